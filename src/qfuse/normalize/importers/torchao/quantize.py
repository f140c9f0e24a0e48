"""``torchao.quantize_affine``."""

from __future__ import annotations

from typing import ClassVar

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import dtype_of, node_of, optional_node, shape_of
from qfuse.ir.quant.spec import Arithmetic, dtype_name
from qfuse.ir.sizes import element_count
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.qdq import (
    QdqRule,
    QdqSite,
    check_clamp,
    check_rounds_nothing,
    check_zero_point_dtype,
    make_spec,
)
from qfuse.normalize.importers.qparams import check_float, fit, fit_zero_point
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments, promoted
from qfuse.normalize.importers.torch_ops import Registered
from qfuse.normalize.importers.torchao.block_size import canonical_block, storage_of
from qfuse.rewrite.prelude import MissCode, Node, OpOverload

_ARGUMENTS = (
    *("input", "block_size", "scale", "zero_point", "output_dtype"),
    *("quant_min", "quant_max"),
)
_ZERO_POINT_FIX = "give a zero point of zeros"
_READABLE = (torch.float32, torch.float16, torch.bfloat16)


class NormalizeQuantizeAffine(QdqRule):
    """``torchao.quantize_affine`` becomes ``qfuse.quantize``.

    It multiplies by ``1 / scale``, computed in the scale's dtype, in the common dtype of data and
    scale: a bfloat16 tensor with a bfloat16 scale is quantized in bfloat16.

    Before::

        quantize_affine(x: [B, S, K], [1, 1, K], scale: [B, S], zero_point: [B, S], int8)

    After::

        qfuse.quantize(x, [B, S, 1], [B, S, 1], "int8[-128,127] 1x1x* ...")

    Refuses: float8, which it rounds to integers first; a zero point of a wider float dtype; bounds
    that are not exact in the dtype in which it clamps; block sizes that are not known.
    """

    name = "normalize-quantize-affine"
    anchors = Registered("torchao::quantize_affine")
    op: ClassVar[OpOverload] = ops.quantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        x, scale, zero = node_of(a["input"]), node_of(a["scale"]), optional_node(a["zero_point"])
        dtype = dtype_argument(a["output_dtype"])
        if dtype_of(x) not in _READABLE:
            names = ", ".join(map(dtype_name, _READABLE))
            raise cannot_run(node, f"it quantizes {dtype_name(dtype_of(x))}, and takes {names}")
        # torchao takes an empty tensor for none, and then adds `None`, which raises.
        if zero is None or element_count(shape_of(zero)) == 0:
            raise cannot_run(node, "it has no zero point, and adds one", fix=_ZERO_POINT_FIX)
        check_rounds_nothing(node, dtype)
        check_float(scale)
        storage = storage_of(node, dtype, a["quant_min"], a["quant_max"])
        # Only unsigned sub-byte dtypes are stored in bytes; a signed one keeps its own dtype.
        if dtype_of(node) != storage[0]:
            text = "{} is not a storage type"
            raise RefusedError(MissCode.DTYPE, node, text, dtype_name(dtype_of(node)))
        block = canonical_block(node, x, a["block_size"])
        math = Arithmetic(promoted(node, dtype_of(x), dtype_of(scale)))
        spec = make_spec(node, storage, block, dtype_of(x), math)
        check_clamp(node, spec)
        check_zero_point_dtype(zero, math.compute)
        grid = spec.grid(shape_of(x))
        fitted = fit(node, scale, grid)
        return QdqSite(node, x, fitted, fit_zero_point(node, zero, grid), spec)
