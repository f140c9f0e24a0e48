"""``quantized_decomposed.choose_qparams*``, where their shape functions are correct.

That of ``choose_qparams_per_token`` is not, so it is normalized with its user: see ``per_token``.
On a tensor without elements these ops raise; the canonical op does not.
"""

from __future__ import annotations

import torch

from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import dtype_name
from qfuse.normalize.importers.choose import ChooseRule, ChooseSite, used_results
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.pt2e.per_tensor import check_readable
from qfuse.normalize.importers.qdq import quant_range
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.rewrite.prelude import MissCode, Node

_SYMMETRIC = "quantized_decomposed::choose_qparams_symmetric"
_ASYMMETRIC = "quantized_decomposed::choose_qparams"


class NormalizeChoosePerTensor(ChooseRule):
    """``choose_qparams.tensor`` and ``choose_qparams_symmetric.tensor`` become the canonical op.

    Before::

        choose_qparams.tensor(x, 0, 255, 2**-12, uint8) -> float64[1], int64[1]

    After::

        qfuse.choose_qparams(x, "decomposed-affine uint8[0,255] *x* ...") -> [1, 1], [1, 1]

    Refuses: a pair that is used as one tuple.
    """

    name = "normalize-choose-per-tensor"
    anchors = Registered(_ASYMMETRIC, _SYMMETRIC)

    def read(self, node: Node) -> ChooseSite:
        """View a call."""
        a = known_arguments(node, ("input", "quant_min", "quant_max", "eps", "dtype"))
        x, dtype, eps = node_of(a["input"]), dtype_argument(a["dtype"]), a["eps"]
        assert isinstance(eps, float), f"the schema says so: {eps!r}"
        check_readable(node, x)
        low, high = quant_range(node, a["quant_min"], a["quant_max"])
        # The op checks at run time that the range has 0 and more than one value in it.
        if not low <= 0 <= high or low == high:
            raise cannot_run(node, f"the range [{low}, {high}] does not reach both sides of 0")
        symmetric = str(node.target).startswith("quantized_decomposed.choose_qparams_symmetric.")
        formula = Formula.DECOMPOSED_SYMMETRIC if symmetric else Formula.DECOMPOSED_AFFINE
        block = (None,) * len(shape_of(x))
        spec = ChooseSpec(formula, dtype, low, high, block, eps, torch.float64, torch.int64)
        return ChooseSite(x, spec, used_results(node))


class NormalizeChoosePerToken(ChooseRule):
    """``choose_qparams_per_token_asymmetric`` becomes the canonical op.

    Refuses: another dtype than int8, since the op ignores it; a pair that is used as one tuple.
    """

    name = "normalize-choose-per-token"
    anchors = Registered(
        "quantized_decomposed::choose_qparams_per_token_asymmetric",
        "quantized_decomposed::_choose_qparams_per_token_asymmetric_impl",
    )

    def read(self, node: Node) -> ChooseSite:
        """View a call."""
        a = known_arguments(node, ("input", "dtype"))
        x, dtype = node_of(a["input"]), dtype_argument(a["dtype"])
        rank = len(shape_of(x))
        if rank == 0 or not dtype_of(x).is_floating_point:
            text = "it chooses for {} of rank {}"
            raise RefusedError(MissCode.DTYPE, x, text, dtype_name(dtype_of(x)), rank)
        # The op has -128 and 127 in its code, whatever dtype it is given.
        if dtype is not torch.int8:
            text = "the op chooses for int8, and its dtype argument is {}"
            raise RefusedError(MissCode.DTYPE, node, text, dtype_name(dtype))
        spec = ChooseSpec(
            Formula.TOKEN_ASYMMETRIC,
            torch.int8,
            -128,
            127,
            (*(1,) * (rank - 1), None),
            torch.finfo(torch.float32).eps,
            torch.float64,
            torch.int64,
        )
        return ChooseSite(x, spec, used_results(node))
