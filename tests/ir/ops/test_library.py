"""The registry: schemas that exported programs depend on, and what is known of every op."""

from __future__ import annotations

from typing import Any

import torch

from qfuse.ir.ops import library as ops
from qfuse.ir.ops.linear import FusedLinear
from qfuse.testing.build import GraphBuilder
from qfuse.testing.quant import QuantizedLinear

SCHEMAS = """\
quantize(Tensor x, Tensor scale, Tensor? zero_point, str spec, Tensor? outer_scale=None) -> Tensor
dequantize(Tensor q, Tensor scale, Tensor? zero_point, str spec, Tensor? outer_scale=None) -> Tensor
choose_qparams(Tensor x, str choose, Tensor? outer_scale=None) -> (Tensor, Tensor)
requantize(Tensor q, Tensor scale, Tensor? zero_point, str spec, \
Tensor out_scale, Tensor? out_zero_point, str out_spec, \
Tensor? outer_scale=None, Tensor? out_outer_scale=None) -> Tensor
linear(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor weight, Tensor? weight_scale, Tensor? weight_zero_point, str weight_spec, \
Tensor? bias, Tensor? out_scale, Tensor? out_zero_point, str out_spec, \
str epilogue, Tensor[] extras, Tensor? x_outer_scale=None, \
Tensor? weight_outer_scale=None, Tensor? out_outer_scale=None) -> Tensor
convolution(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor weight, Tensor? weight_scale, Tensor? weight_zero_point, str weight_spec, \
Tensor? bias, int[] stride, int[] padding, int[] dilation, bool transposed, \
int[] output_padding, int groups, Tensor? out_scale, Tensor? out_zero_point, str out_spec, \
str epilogue, Tensor[] extras, Tensor? x_outer_scale=None, \
Tensor? weight_outer_scale=None, Tensor? out_outer_scale=None) -> Tensor
matmul(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor other, Tensor? other_scale, Tensor? other_zero_point, str other_spec, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str epilogue, Tensor[] extras, \
Tensor? x_outer_scale=None, Tensor? other_outer_scale=None, \
Tensor? out_outer_scale=None) -> Tensor
rms_norm(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor? residual, Tensor? residual_scale, Tensor? residual_zero_point, str residual_spec, \
Tensor? weight, str norm, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str choose, str keep) -> Tensor[]
layer_norm(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor? residual, Tensor? residual_scale, Tensor? residual_zero_point, str residual_spec, \
Tensor? weight, Tensor? bias, str norm, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str choose, str keep) -> Tensor[]
activation(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
str epilogue, Tensor[] extras, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str choose, str keep) -> Tensor[]
softmax(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor? mask, str softmax, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str choose, str keep) -> Tensor[]
elementwise(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor? other, Tensor? other_scale, Tensor? other_zero_point, str other_spec, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str elementwise, str epilogue, \
Tensor? x_outer_scale=None, Tensor? other_outer_scale=None, \
Tensor? out_outer_scale=None) -> Tensor
average_pool(Tensor x, Tensor? x_scale, Tensor? x_zero_point, str x_spec, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str pool, \
Tensor? x_outer_scale=None, Tensor? out_outer_scale=None) -> Tensor
scaled_dot_product_attention(Tensor query, Tensor? query_scale, Tensor? query_zero_point, \
str query_spec, Tensor key, Tensor? key_scale, Tensor? key_zero_point, str key_spec, \
Tensor value, Tensor? value_scale, Tensor? value_zero_point, str value_spec, Tensor? mask, \
Tensor? out_scale, Tensor? out_zero_point, str out_spec, str attention, \
Tensor? query_outer_scale=None, Tensor? key_outer_scale=None, \
Tensor? value_outer_scale=None, Tensor? out_outer_scale=None) -> Tensor
"""


def test_schemas_stay() -> None:
    found = [str(op._schema) for op in (*ops.CANONICAL, *ops.FUSED)]
    assert found == [f"qfuse::{line}" for line in SCHEMAS.splitlines()]


def test_every_op_is_found_by_its_overload() -> None:
    for op in (*ops.CANONICAL, *ops.FUSED):
        declared = ops.declaration_of(op)
        assert declared is not None
        assert declared.overload is op
    assert ops.declaration_of(torch.ops.aten.add.Tensor) is None
    assert ops.declaration_of(None) is None


def test_a_call_is_viewed_as_its_op() -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 4, 8)
    q = block.weight_node("w")
    x = b.arg("x", torch.float32, 2, 8)
    args: tuple[Any, ...] = (x, None, None, "", x, None, None, "", None, None, None, "", "", [])
    node = b.call(ops.linear, *args)
    assert isinstance(ops.as_op(node), FusedLinear)
    assert ops.as_op(x) is None
    assert ops.as_op(None) is None
    assert ops.stored_spec(node) is None
    assert ops.output_of(node) is None
    assert ops.stored_spec(q) is None
