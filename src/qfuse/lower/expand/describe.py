"""Short descriptions of fused ops for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from qfuse.ir.graph.stage_graph import constant_of, op_name
from qfuse.ir.ops.activation import Activation, as_activation
from qfuse.ir.ops.convolution import FusedConvolution
from qfuse.ir.ops.matmul import FusedMatmul
from qfuse.ir.ops.norms import as_fused_norm
from qfuse.ir.ops.output import Output
from qfuse.ir.ops.product import FusedProduct, as_fused_product
from qfuse.ir.ops.softmax import as_softmax
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.quant.block import is_per_input, rows_share_scale
from qfuse.ir.quant.element import ScaleFormat
from qfuse.ir.quant.spec import Granularity, QuantSpec, dtype_name, stored_name
from qfuse.ir.sizes import Size
from qfuse.lower.problems.claim import Claim
from qfuse.lower.problems.linear_rowwise import LinearRowwiseProblem
from qfuse.lower.problems.problem import Problem
from qfuse.lower.problems.product import ProductProblem, split_epilogue
from qfuse.lower.problems.rowwise import RowwiseOp, RowwiseProblem


def describe_problem(problem: Problem) -> str:
    """Describe what a kernel computes: operands, epilogue ops and results."""
    match problem:
        case ProductProblem():
            return _product(problem.fused)
        case LinearRowwiseProblem():
            return _linear_rowwise(problem)
        case RowwiseProblem():
            return describe_rowwise(problem.op)
        case _:
            raise AssertionError(f"a problem of another kind: {type(problem)}")


def describe_node(node: Node) -> str:
    """Describe a call: a fused op as for a kernel, any other op by its name."""
    product, rowwise = as_fused_product(node), as_fused_norm(node) or as_activation(node)
    softmax = as_softmax(node)
    if product is not None:
        return _product(product)
    if softmax is not None:
        name = "softmax" if softmax.mask is None else "mask + softmax"
        return f"{name}: {_quantizes(softmax.x, softmax.x_params, softmax.output)}"
    return op_name(node) if rowwise is None else describe_rowwise(rowwise)


def describe_rest(problem: Problem, claim: Claim) -> str:
    """Name the epilogue ops and the quantize that run as ops of their own after the kernel."""
    if not isinstance(problem, ProductProblem):
        return ""
    left = []
    epilogue = split_epilogue(problem, claim)[1]
    if epilogue.ops:
        left.append(str(epilogue))
    if problem.fused.out_params is not None and not claim.output:
        left.append("quantize")
    return f"after the kernel: {' and '.join(left)}" if left else ""


def describe_rowwise(op: RowwiseOp) -> str:
    """Describe a rowwise op: ``add + rms_norm: bfloat16 -> int8 per-token dynamic``."""
    if isinstance(op, Activation):
        name = str(op.epilogue) or "quantize"
    else:
        name = op_name(op.node).removeprefix("qfuse.")
        name = name if op.residual is None else f"add + {name}"
    return f"{name}: {_quantizes(op.x, op.x_params, op.output)}"


def _quantizes(x: Node, params: QuantParams | None, output: Output) -> str:
    """Describe input and result: ``bfloat16 -> int8 per-token dynamic``."""
    text, spec = _edge(x, params, rows=Granularity.PER_TOKEN), output.spec
    if spec is None:
        return text
    granularity = granularity_of(spec, shape_of(x), Granularity.PER_TOKEN)
    how = "" if output.choose is None else " dynamic"
    return f"{text} -> {stored_name(spec.dtype, spec.element)} {granularity}{how}"


def _linear_rowwise(problem: LinearRowwiseProblem) -> str:
    """Describe a linear fused with a rowwise op."""
    fused, chosen = problem.problem.fused, problem.op.output.chosen
    text = _product(fused, problem.steps)
    if chosen is None:
        return text
    spec = chosen[0]
    granularity = granularity_of(spec, shape_of(fused.node), Granularity.PER_TOKEN)
    return f"{text} -> {stored_name(spec.dtype, spec.element)} {granularity} dynamic"


def _product(fused: FusedProduct, steps: str = "") -> str:
    """Describe the operands of a fused product: ``int8 per-token dynamic x int8 per-channel``.

    Args:
        fused: The product.
        steps: The epilogue ops, if they are not those of the op alone.
    """
    x = _edge(fused.x, fused.x_params, rows=Granularity.PER_TOKEN)
    if isinstance(fused, FusedMatmul):
        right, sizes = _right_edge(fused), shape_of(fused.other)
    else:
        right = _edge(fused.weight, fused.weight_params, rows=Granularity.PER_CHANNEL)
        sizes = shape_of(fused.weight)
    text = f"{x} x {right} [{', '.join(map(str, sizes))}]{_geometry(fused)}"
    steps = steps or str(fused.epilogue)
    if steps:
        text += f" | {steps}"
    if fused.out_params is not None:
        text += f" -> {dtype_name(fused.out_params.spec.dtype)}"
    return text


def _geometry(fused: FusedProduct) -> str:
    """Describe the settings of a convolution that are not the usual ones."""
    if not isinstance(fused, FusedConvolution):
        return ""
    words = ["transposed"] if fused.transposed else []
    settings = {"stride": fused.stride, "padding": fused.padding, "dilation": fused.dilation}
    for name, values in settings.items():
        if set(values) != {0 if name == "padding" else 1}:
            shown = values[:1] if len(set(values)) == 1 else values
            words.append(f"{name} {'x'.join(map(str, shown))}")
    if fused.groups != 1:
        words.append(f"{fused.groups} groups")
    return "".join(f", {word}" for word in words)


def _right_edge(fused: FusedMatmul) -> str:
    """Describe the right operand of a matmul, whose columns are the rows of its transpose."""
    params, shape = fused.other_params, tuple(shape_of(fused.other))
    if params is None:
        return dtype_name(dtype_of(fused.other))
    *lead, k, n = params.spec.block
    turned = replace(params, spec=params.spec.with_block((*lead, n, k), params.spec.outer))
    return _params_edge(turned, (*shape[:-2], shape[-1], shape[-2]), Granularity.PER_TOKEN)


def _edge(value: Node, params: QuantParams | None, rows: Granularity) -> str:
    if params is None:
        return dtype_name(dtype_of(value))
    return _params_edge(params, shape_of(value), rows)


def _params_edge(params: QuantParams, shape: Sequence[Size], rows: Granularity) -> str:
    spec = params.spec
    name = stored_name(spec.dtype, spec.element)
    if not spec.is_full_range:
        name += f"[{spec.quant_min},{spec.quant_max}]"
    when = "" if constant_of(params.scale) is not None else " dynamic"
    zero = "" if params.zero_point is None else " asymmetric"
    granularity = str(granularity_of(spec, shape, rows))
    if rows is Granularity.PER_CHANNEL and is_per_input(spec.block):
        granularity = "per input feature"
    scales = "" if spec.scale_format is ScaleFormat.FLOAT else f" {spec.scale_format}"
    levels = "" if spec.outer is None else " two-level"
    return f"{name} {granularity}{scales}{levels}{when}{zero}"


def granularity_of(spec: QuantSpec, shape: Sequence[Size], rows: Granularity) -> Granularity:
    """Name the granularity; one scale per row is ``rows``: per token, or per channel."""
    granularity = spec.granularity(shape)
    if rows_share_scale(spec.block, shape) and granularity is not Granularity.PER_TENSOR:
        return rows
    return granularity
