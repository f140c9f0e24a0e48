"""``torchao.choose_qparams_affine``."""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.ops.views import dtype_of, optional_node
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import dtype_name
from qfuse.normalize.importers.choose import ChooseRule, ChooseSite, used_results
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.rule import dtype_argument, known_arguments
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.normalize.importers.torchao.block_size import canonical_block, check_reduces, storage_of

_ARGUMENTS = (
    *("input", "mapping_type", "block_size", "target_dtype", "quant_min", "quant_max", "eps"),
    *("scale_dtype", "zero_point_dtype", "keepdim"),
)
_FORMULAS = {
    "SYMMETRIC": Formula.AO_SYMMETRIC,
    "SYMMETRIC_NO_CLIPPING_ERR": Formula.AO_SYMMETRIC_NO_CLIPPING,
    "ASYMMETRIC": Formula.AO_ASYMMETRIC,
}


class NormalizeChooseAffine(ChooseRule):
    """``torchao.choose_qparams_affine`` becomes ``qfuse.choose_qparams``, with or without keepdim.

    Before::

        choose_qparams_affine(x: [B, S, K], "ASYMMETRIC", [1, 1, K], int8) -> [B, S], [B, S]

    After::

        qfuse.choose_qparams(x, "ao-asymmetric int8[-128,127] 1x1x* ...") -> [B, S, 1], [B, S, 1]

    with views for users of the lower rank. Refuses: a block of ones, with which torchao
    reduces the whole tensor; a pair that is used as one tuple; block sizes that are not known.
    """

    name = "normalize-choose-affine"
    anchors = Registered("torchao::choose_qparams_affine")

    def read(self, node: Node) -> ChooseSite:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        x = optional_node(a["input"])
        if x is None:
            raise cannot_run(node, "its input is not a tensor")
        if not dtype_of(x).is_floating_point:
            raise cannot_run(node, f"it chooses for {dtype_name(dtype_of(x))}")
        formula = _FORMULAS.get(str(a["mapping_type"]))
        if formula is None:
            raise cannot_run(node, f"there is no mapping {a['mapping_type']!r}")
        target = dtype_argument(a["target_dtype"])
        stored, (low, high) = storage_of(node, target, a["quant_min"], a["quant_max"])
        block = canonical_block(node, x, a["block_size"])
        check_reduces(node, x, block)
        spec = ChooseSpec(
            formula,
            stored,
            low,
            high,
            block,
            _eps(a["eps"], dtype_of(x)),
            dtype_argument(a["scale_dtype"], dtype_of(x)),
            _zero_point_dtype(a["zero_point_dtype"], formula, dtype_of(x)),
        )
        return ChooseSite(x, spec, used_results(node))


def _eps(value: Argument, dtype: torch.dtype) -> float:
    if value is None:
        # torchao's default is the smallest normal number, not `finfo.eps`.
        return float(torch.finfo(dtype).smallest_normal)
    assert isinstance(value, (int, float)), f"the schema says so: {value!r}"
    return float(value)


def _zero_point_dtype(value: Argument, formula: Formula, dtype: torch.dtype) -> torch.dtype:
    """Return the zero point's dtype: by default, the symmetric formulas keep the data's dtype."""
    return dtype_argument(value, torch.int32 if formula is Formula.AO_ASYMMETRIC else dtype)
