"""``quantized_decomposed.(de)quantize_per_token``: parameters broadcast from the right.

Nothing is cast first: the arithmetic follows torch's type promotion of the data and the scale.
Quantize adds the zero point before it rounds.

``choose_qparams_per_token`` returns scales in the data's dtype although its shape function
returns float64, so the fake value of such a scale has the wrong dtype. Such a choice is
normalized together with the op that uses it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch

from qfuse.ir.errors import BlockError
from qfuse.ir.graph.schema import is_call
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.view_ops import RESHAPES
from qfuse.ir.ops.views import dtype_of, node_of, shape_of
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Arithmetic, Block, QuantSpec, dtype_name
from qfuse.ir.sizes import element_count, same_size
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.pt2e.narrow_scale import is_exact_in_float32
from qfuse.normalize.importers.qdq import (
    QdqRule,
    QdqSite,
    check_clamp,
    check_quant_range,
    check_rounds_nothing,
    check_subtraction,
    check_zero_point_dtype,
    make_spec,
    quant_range,
)
from qfuse.normalize.importers.qparams import check_float, fit, fit_zero_point
from qfuse.normalize.importers.rule import RefusedError, dtype_argument, known_arguments, promoted
from qfuse.normalize.importers.torch_ops import Registered, registered
from qfuse.rewrite.prelude import MissCode, Node, OpOverload, Rewriter, arguments, aten

_ARGUMENTS = ("input", "scales", "zero_points", "quant_min", "quant_max", "dtype")

# Ops that may stand between the choice of a scale and its use.
_PASSING = (
    *RESHAPES,
    *(aten.expand.default, aten.clone.default, aten._to_copy.default, aten.alias.default),
    *(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.clamp.default),
)
_CHOOSE = "quantized_decomposed::choose_qparams_per_token"


@dataclass(frozen=True, slots=True)
class _ChosenScale:
    """The scale of a ``choose_qparams_per_token``, with its actual dtype."""

    x: Node
    spec: ChooseSpec

    def build(self, rw: Rewriter, hint: str) -> Node:
        """Add the canonical choice again; CSE combines equal choices later."""
        del hint
        return rw.item(rw.call(ops.choose_qparams, self.x, str(self.spec)), 0)


class NormalizeQuantizePerToken(QdqRule):
    """``quantize_per_token`` becomes ``qfuse.quantize`` with one scale per token.

    Refuses: parameters without axes, which torch promotes by other rules; a zero point of a wider
    float dtype, or of another shape than the scale; float8, which is rounded to integers first;
    bounds that are not exact in the dtype in which it clamps.
    """

    name = "normalize-quantize-per-token"
    anchors = Registered("quantized_decomposed::quantize_per_token")
    op: ClassVar[OpOverload] = ops.quantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, _ARGUMENTS)
        x, scale, zero = node_of(a["input"]), node_of(a["scales"]), node_of(a["zero_points"])
        dtype, real = dtype_argument(a["dtype"]), dtype_of(x)
        check_rounds_nothing(node, dtype)
        chosen = _chosen(scale, zero)
        codes = quant_range(node, a["quant_min"], a["quant_max"])
        check_quant_range(node, dtype, codes)
        of_scale = dtype_of(scale) if chosen is None else chosen.spec.scale_dtype
        # The source adds the zero point and then rounds, unlike per tensor and per channel.
        math = Arithmetic(promoted(node, real, of_scale), zero_point_first=True)
        spec = make_spec(node, (dtype, codes), _block(node, x, scale, zero), real, math)
        check_clamp(node, spec)
        if chosen is not None:
            return QdqSite(node, x, chosen, None, spec)
        check_zero_point_dtype(zero, math.compute)
        return _site(node, x, scale, zero, spec)


class NormalizeDequantizePerToken(QdqRule):
    """``dequantize_per_token`` becomes ``qfuse.dequantize`` with one scale per token.

    A float64 scale that holds values of a narrower float, as those chosen from float32 tokens do,
    is multiplied in float32 where that has the same bits: kernels compute in float32.

    Refuses: parameters without axes; a zero point of another shape than the scale, or whose
    difference from the quantized values may not be exact; a dtype argument, which the op ignores,
    that is not the dtype of the quantized values.
    """

    name = "normalize-dequantize-per-token"
    anchors = Registered("quantized_decomposed::dequantize_per_token")
    op: ClassVar[OpOverload] = ops.dequantize

    def read(self, node: Node) -> QdqSite:
        """View a call."""
        a = known_arguments(node, (*_ARGUMENTS, "output_dtype"))
        q, scale, zero = node_of(a["input"]), node_of(a["scales"]), node_of(a["zero_points"])
        dtype = dtype_argument(a["dtype"])
        if dtype != dtype_of(q):
            text = "its dtype argument is {}, but its input is {}"
            names = dtype_name(dtype), dtype_name(dtype_of(q))
            raise RefusedError(MissCode.DTYPE, node, text, *names)
        if dtype.is_floating_point:
            raise cannot_run(node, f"it subtracts integers from {dtype_name(dtype)}")
        chosen = _chosen(scale, zero)
        codes = quant_range(node, a["quant_min"], a["quant_max"])
        of_scale = dtype_of(scale) if chosen is None else chosen.spec.scale_dtype
        real = dtype_argument(a["output_dtype"])
        if of_scale is torch.float64 and is_exact_in_float32(q, scale, zero, real):
            of_scale = torch.float32
        math = Arithmetic(of_scale, zero_point_first=True)
        spec = make_spec(node, (dtype, codes), _block(node, q, scale, zero), real, math)
        if chosen is not None:
            return QdqSite(node, q, chosen, None, spec)
        check_subtraction(q, zero, math.compute)
        return _site(node, q, scale, zero, spec)


def _site(node: Node, value: Node, scale: Node, zero_point: Node, spec: QuantSpec) -> QdqSite:
    check_float(scale)
    grid = spec.grid(shape_of(value))
    fitted = fit(node, scale, grid)
    return QdqSite(node, value, fitted, fit_zero_point(node, zero_point, grid), spec)


def _chosen(scale: Node, zero_point: Node) -> _ChosenScale | None:
    """Return the choice of the parameters, if their fake values have the wrong dtype.

    Raises:
        RefusedError: The parameters do not come from such a choice directly and together.
    """
    choose = _choose_of(scale)
    if choose is None and _choose_of(zero_point) is None:
        return None
    # An op in between computes with the dtype that the fake value claims, so its own type is wrong
    # too.
    direct = scale.target is operator.getitem and zero_point.target is operator.getitem
    if choose is None or not direct or _choose_of(zero_point) is not choose:
        text = (
            "only a part of a choose_qparams_per_token is used directly, and its dtype is not known"
        )
        raise RefusedError(MissCode.DTYPE, scale, text)
    a = arguments(choose)
    x, dtype = node_of(a["input"]), dtype_argument(a["dtype"])
    if dtype is not torch.int8:
        raise cannot_run(choose, f"it chooses only for int8, not for {dtype_name(dtype)}")
    # It widens float16 only.
    kind = torch.float32 if dtype_of(x) is torch.float16 else dtype_of(x)
    block = (*(1,) * (len(shape_of(x)) - 1), None)
    spec = ChooseSpec(Formula.TOKEN_SYMMETRIC, torch.int8, -128, 127, block, 1e-5, kind, kind)
    return _ChosenScale(x, spec)


def _choose_of(param: Node) -> Node | None:
    """Return the ``choose_qparams_per_token`` that ``param`` derives from, if there is one."""
    ops_of_choice = registered(_CHOOSE)
    while param.target is operator.getitem or is_call(param, *_PASSING):
        param = param.all_input_nodes[0]
    return param if is_call(param, *ops_of_choice) else None


def _block(node: Node, value: Node, scale: Node, zero_point: Node) -> Block:
    """Return the blocks of parameters that are broadcast against the data from the right.

    Raises:
        BlockError: They do not fit.
        RefusedError: They are broadcast differently, or sizes are not known.
    """
    blocks = [_block_of(node, value, param) for param in (scale, zero_point)]
    if blocks[0] != blocks[1]:
        text = "scale and zero point are broadcast differently: {} and {}"
        shapes = shape_of(scale), shape_of(zero_point)
        raise RefusedError(MissCode.SHAPE, node, text, *shapes)
    return blocks[0]


def _block_of(node: Node, value: Node, param: Node) -> Block:
    shape, given = shape_of(value), shape_of(param)
    if not given or not shape:
        text = "a tensor without axes is promoted by other rules"
        raise RefusedError(MissCode.SHAPE, node, text)
    padded = (*(1,) * (len(shape) - len(given)), *given)
    count, tokens = element_count(given), element_count(shape[:-1])
    if len(padded) != len(shape) or (None not in (count, tokens) and count != tokens):
        raise _misfit(node, param, shape)
    block: list[int | None] = []
    for axis, (size, have) in enumerate(zip(shape, padded, strict=True)):
        # An axis of one element has one block either way; choose per token, the usual meaning.
        if same_size(have, 1) and (axis == len(shape) - 1 or not same_size(size, 1)):
            block.append(None)
        elif same_size(have, size):
            block.append(1)
        elif isinstance(have, int) and isinstance(size, int):
            raise _misfit(node, param, shape)
        else:
            text = "it is not known before run time whether {} is one entry per token of {}"
            raise RefusedError(MissCode.SHAPE, node, text, given, shape)
    return tuple(block)


def _misfit(node: Node, param: Node, shape: object) -> BlockError:
    return cannot_run(
        node,
        f"parameters of shape {tuple(shape_of(param))} do not fit data of shape {shape}: "
        "one per token is needed",
        fix="give parameters of the data's shape, with the last axis 1",
        kind=BlockError,
    )
