"""``torchao.dequantize_affine``."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.ir.quant.spec import Arithmetic, dtype_name
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.qdq import (
    QdqRule,
    QdqSite,
    check_operand_dtype,
    exact_difference,
    make_spec,
)
from qfuse.normalize.importers.qparams import check_float, fit, fit_zero_point
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments, promoted
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.normalize.importers.torchao.block_size import (
    canonical_block,
    is_unsigned_sub_byte,
    storage_of,
)
from qfuse.rewrite.prelude import MissCode, Node, OpOverload

_ARGUMENTS = (
    *("input", "block_size", "scale", "zero_point", "input_dtype"),
    *("quant_min", "quant_max", "output_dtype"),
)
_WRITABLE = (torch.float32, torch.float16, torch.bfloat16)


class NormalizeDequantizeAffine(QdqRule):
    """``torchao.dequantize_affine`` becomes ``qfuse.dequantize``.

    It converts quantized values and zero point to the output dtype, subtracts there, and multiplies
    in the common dtype of output and scale.

    Before::

        dequantize_affine(w: int8[N, K], [1, 32], scale: [N, K / 32], zero_point, int8, -8, 7)

    After::

        qfuse.dequantize(w, scale, zero_point, "int8[-8,7] 1x32 ...")

    Refuses: a difference that may not be exact in an output dtype narrower than the scale's; block
    sizes that are not known.
    """

    name = "normalize-dequantize-affine"
    anchors = Registered("torchao::dequantize_affine")
    op: ClassVar[OpOverload] = ops.dequantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        q, scale, zero = node_of(a["input"]), node_of(a["scale"]), optional_node(a["zero_point"])
        dtype, real = dtype_argument(a["input_dtype"]), dtype_argument(a["output_dtype"])
        if not is_unsigned_sub_byte(dtype):
            check_operand_dtype(node, q, dtype)
        if real not in _WRITABLE:
            names = ", ".join(map(dtype_name, _WRITABLE))
            raise cannot_run(node, f"it returns {dtype_name(real)}, and must return one of {names}")
        check_float(scale)
        _, codes = storage_of(node, dtype, a["quant_min"], a["quant_max"])
        block = canonical_block(node, q, a["block_size"])
        compute = promoted(node, real, dtype_of(scale))
        spec = make_spec(node, (dtype_of(q), codes), block, real, Arithmetic(compute))
        # The canonical op subtracts in the wider dtype, and so differs where the output dtype
        # rounds.
        if real != compute and not exact_difference(q, 0 if zero is None else zero, real):
            text = "it converts to {} before it multiplies in {}, which may not be exact"
            types = dtype_name(real), dtype_name(compute)
            raise RefusedError(MissCode.ARITHMETIC, node, text, *types)
        grid = spec.grid(shape_of(q))
        fitted = fit(node, scale, grid)
        return QdqSite(node, q, fitted, fit_zero_point(node, zero, grid), spec)
