"""Shared code of the rules that fuse a quantize into its producer, with extra outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx.node import Argument, map_arg

from qfuse.ir.graph.stage_graph import constant_of
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.activation import Activation
from qfuse.ir.ops.norms import FusedNorm
from qfuse.ir.ops.output import ExtraOutput, Output
from qfuse.ir.ops.qdq import Choose, Quantize, as_choose, as_quantize
from qfuse.ir.ops.softmax import Softmax
from qfuse.ir.ops.views import result_of, shape_of, tensor_of
from qfuse.ir.quant.block import block_text, same_grid
from qfuse.ir.quant.choose import fixed_zero_point
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import ZeroPointDomain, dtype_name, stored_name
from qfuse.ir.sizes import is_row_major, same_strides
from qfuse.rewrite.pattern import ANY, Capture, Pattern, let, op
from qfuse.rewrite.prelude import Miss, MissCode, Node, OpOverload, Rewriter


@dataclass(frozen=True, slots=True)
class QuantizedResult:
    """A quantize, and the choice of its parameters if they are chosen for its own input.

    Attributes:
        quantize: The quantize.
        choose: The choice; ``None`` if the parameters are static.
    """

    quantize: Quantize
    choose: Choose | None

    @property
    def ends(self) -> tuple[Node, ...]:
        """The users of the float result that the fusion removes."""
        choice = () if self.choose is None else (self.choose.node,)
        return (*choice, self.quantize.node)

    def block(self, keep: frozenset[ExtraOutput]) -> Output:
        """Return the output block of an op with this result."""
        params = self.quantize.params
        if self.choose is None:
            return Output(params, None, keep)
        return Output(None, (params.spec, self.choose.spec), keep)


@dataclass(frozen=True, slots=True)
class ExtraValue:
    """A float value that has other users, and so becomes an extra output.

    Attributes:
        what: The kind of output.
        node: The node that computes it now.
        dying: Those of its users that the fusion removes.
    """

    what: ExtraOutput
    node: Node
    dying: frozenset[Node]

    @property
    def users(self) -> list[Node]:
        """The users that remain."""
        return [user for user in self.node.users if user not in self.dying]


RESULT = Capture[QuantizedResult]("result")
QUANTIZE = Capture[Node]("quantize")


def quantized(x: Pattern) -> Pattern:
    """Return the pattern of a quantize of ``x``, which captures ``QUANTIZE`` and ``RESULT``."""
    call = op(ops.quantize, x, ANY, ANY, ANY, ANY).named(QUANTIZE.label)
    return call.given(let(RESULT, _quantized_result))


def _quantized_result(node: Node) -> QuantizedResult | Miss:
    quantize = as_quantize(node)
    assert quantize is not None, "the pattern matches only quantizes"
    return quantized_result(quantize)


def quantized_result(quantize: Quantize) -> QuantizedResult | Miss:
    """Return a quantize with the choice of its parameters, if that choice is for its own input.

    Refuses: scales of two levels, used or chosen; a choice for other blocks, or for another storage
    or scale format; a zero point that is omitted although it may be nonzero.
    """
    params = quantize.params
    if params.outer_scale is not None:
        text = "its scales have a second level, and a fused op supports one"
        return Miss(MissCode.GRANULARITY, quantize.node, text)
    scale = result_of(params.scale)
    choose = None if scale is None or scale[1] != 0 else as_choose(scale[0])
    # Parameters chosen for another tensor are operands of the op, as static ones are.
    if choose is None or choose.x is not quantize.x:
        return QuantizedResult(quantize, None)
    return _refuse_choice(quantize, choose) or QuantizedResult(quantize, choose)


def _refuse_choice(quantize: Quantize, choose: Choose) -> Miss | None:
    """Refuse a choice for the input of a quantize that is not what the quantize uses."""
    params = quantize.params
    node, spec, chosen = quantize.node, params.spec, choose.spec
    if chosen.outer or choose.outer_scale is not None:
        text = "its scales are chosen relative to a second level, and a fused op supports one"
        return Miss(MissCode.GRANULARITY, node, text)
    # Different block sizes are the same block if both cover the axis.
    if not same_grid(spec.block, chosen.block, shape_of(quantize.x)):
        text = "parameters are chosen in blocks of {} and used in blocks of {}"
        details = block_text(chosen.block), spec.block_text()
        return Miss(MissCode.GRANULARITY, node, text, *details)
    # A scale chosen for int8 is about max / 127; in int4 it would clip everything above max / 18.
    if (spec.dtype, spec.element) != (chosen.dtype, chosen.element):
        text = "parameters that are chosen for {} are used for {}"
        kinds = (chosen.dtype, chosen.element), (spec.dtype, spec.element)
        return Miss(MissCode.DTYPE, node, text, *(stored_name(*k) for k in kinds))
    if not _is_format_of(chosen.scale_dtype, spec.scale_format):
        text = "scales that are chosen in {} are used as {}"
        details = dtype_name(chosen.scale_dtype), spec.scale_format
        return Miss(MissCode.DTYPE, node, text, *details)
    zero = params.zero_point
    # Result 1 of a choice is its zero point. The op chooses both together: a quantize that uses
    # another zero point, or omits one that is not 0, is shifted against them.
    own = zero is not None and result_of(zero) == (choose.node, 1)
    always_zero = fixed_zero_point(chosen) == 0
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET or not (own or (zero is None and always_zero)):
        text = "it does not use the zero point that is chosen with its scale"
        return Miss(MissCode.ZERO_POINT, node, text)
    return None


def _is_format_of(dtype: torch.dtype, scale_format: ScaleFormat) -> bool:
    """Whether a dtype matches a scale format; one-byte scales have formats of their own."""
    if scale_format.dtype is not None:
        return dtype is scale_format.dtype
    return dtype.itemsize > 1


@dataclass(frozen=True, slots=True)
class FuseQuantizeSite:
    """A norm, an activation or a softmax, and the quantize of its result.

    Attributes:
        fused: The fused op; its node is the quantize.
        result: The quantize, and the choice of its parameters.
        kept: The float values with other users, in the order of the op's results.
        point: The node in front of which the op is inserted.
        values: The op's (fake) results.
    """

    fused: FusedNorm | Activation | Softmax
    result: QuantizedResult
    kept: tuple[ExtraValue, ...]
    point: Node
    values: list[torch.Tensor]

    def insert(self, rw: Rewriter) -> None:
        """Insert the op in front of the first user of its results."""
        with rw.before(self.point):
            args = _available(self.fused.call_args(), self.point, rw)
            node = rw.replay(self.fused.overload, args, {}, self.values)
            _replace_results(node, self.result, self.fused.output, self.kept, rw)


def fuse_site(
    fused: FusedNorm | Activation | Softmax, result: QuantizedResult, kept: tuple[ExtraValue, ...]
) -> FuseQuantizeSite | Miss:
    """Return where the op is inserted, and its results.

    Refuses: operands that are computed too late; strides that would change.
    """
    args = fused.call_args()
    point = _insertion_point(result, kept, args)
    if isinstance(point, Miss):
        return point
    values = _results_like(fused.overload, args, result, kept)
    if isinstance(values, Miss):
        return values
    return FuseQuantizeSite(fused, result, kept, point, values)


def _insertion_point(
    result: QuantizedResult, kept: Sequence[ExtraValue], args: Sequence[Argument]
) -> Node | Miss:
    """Return the first user of the new op's results, if all operands come before it.

    Constants may come later: they are loaded again.
    """
    # In the order of the graph: the new op has to precede all users of its results.
    point = min((*result.ends, *(user for k in kept for user in k.users)))
    for operand in _nodes(args):
        if not operand < point and constant_of(operand) is None:
            given = result.quantize.params.tensors
            text = "{} is computed only after {} has used a result of the fused op"
            if operand in given and result.choose is None:
                text = (
                    "{}, by which it is quantized, is computed from {} by ops that are not read as "
                )
                text += "a choice of parameters; in float16 none are"
            return Miss(MissCode.ORDER, operand, text, operand.name, point.name)
    return point


def _results_like(
    op: OpOverload, args: Sequence[Argument], result: QuantizedResult, kept: Sequence[ExtraValue]
) -> list[torch.Tensor] | Miss:
    """Return the (fake) results of the new op, with the strides of the values that they replace.

    Refuses: strides that would change.
    """
    choice = () if result.choose is None else tuple(result.choose.node.meta["val"])
    node = result.quantize.node
    old = [tensor_of(node), *choice, *(tensor_of(k.node) for k in kept)]
    if all(is_row_major(tensor_of(n)) for n in (*_nodes(args), node, *(k.node for k in kept))):
        # Elementwise arithmetic leaves row-major tensors row-major.
        return old
    # The strides of results of other layouts are known to the op's fake kernel only.
    new = op(*map_arg(tuple(args), lambda n: n.meta["val"]))
    for before, after in zip(old, new, strict=True):
        if not same_strides(before, after):
            text = "the strides of a result would change from {} to {}"
            details = before.stride(), after.stride()
            return Miss(MissCode.SHAPE, node, text, *details)
    return list(new)


def _replace_results(
    node: Node, result: QuantizedResult, output: Output, kept: Sequence[ExtraValue], rw: Rewriter
) -> None:
    """Replace all uses of the old values by the results of the new op.

    Args:
        node: The new op.
        result: The quantize that it replaces, and the choice of its parameters.
        output: The op's output block.
        kept: The float values that it replaces.
        rw: Edits the graph; new nodes are inserted next to the new op.
    """
    items = [rw.item(node, index) for index in range(output.count)]
    rw.replace(result.quantize.node, items[0])
    if result.choose is not None:
        for part in list(result.choose.node.users):
            found = result_of(part)
            assert found is not None, "the users of a choice are its results"
            rw.replace(part, items[1 + found[1]])
    for k in kept:
        rw.replace(k.node, items[output.place(k.what)], but=k.dying)


def _available(args: Sequence[Argument], point: Node, rw: Rewriter) -> tuple[Argument, ...]:
    """Return the arguments of a call at ``point``; constants defined later are loaded again."""

    def earlier(node: Node) -> Node:
        if node < point:
            return node
        value = constant_of(node)
        assert value is not None, "only constants may come later"
        return rw.constant(value, str(node.target))

    read: tuple[Argument, ...] = map_arg(tuple(args), earlier)
    return read


def _nodes(args: Sequence[Argument]) -> list[Node]:
    found: list[Node] = []
    map_arg(tuple(args), found.append)
    return found
