"""What is nearly a norm, and why the rule that fuses norms takes it for none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.norm import Spelling, Writer, refused
from tests.support.cases.propagate import applied, only_miss
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.optimize.fuse.norm import FuseNormQuantize

aten = torch.ops.aten
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# Refusals: what is nearly a norm, and why it is none.


def rms(w: Writer, x: Node, v: Node, eps: Any = 1e-5, **kwargs: Any) -> Node:
    v = w.call(aten.add.Tensor, v, eps, **kwargs)
    return w.mul(x, w.call(aten.rsqrt.default, v))


def mean_square(w: Writer, dims: Any = (-1,), keepdim: bool = True, **kwargs: Any) -> Node:
    return w.call(aten.mean.dim, w.mul(w.x, w.x), list(dims), keepdim, **kwargs)


def test_refuses_the_statistics_of_a_layer_norm() -> None:
    w = Writer("m", 8)
    norm = w.call(aten.native_layer_norm.default, w.x, [8], None, None, 1e-5)
    assert refused(w.done(w.static(w.b.item(norm, 1))), m=3) is MissCode.PATTERN


def test_refuses_a_mean_whose_axis_is_gone() -> None:
    w = Writer(8, 8)
    y = rms(w, w.x, mean_square(w, keepdim=False))
    assert refused(w.done(w.static(y))) is MissCode.ARGUMENT


@pytest.mark.parametrize("dims", [(0,), (1,), (0, 2), (0, 1)])
def test_refuses_a_mean_over_other_axes(dims: tuple[int, ...]) -> None:
    w = Writer(4, 4, 4)
    assert refused(w.done(w.static(rms(w, w.x, mean_square(w, dims))))) is MissCode.AXIS


def test_refuses_a_mean_over_all_axes_that_are_not_named() -> None:
    w = Writer(4, 4)
    assert refused(w.done(w.static(rms(w, w.x, mean_square(w, ()))))) is MissCode.AXIS


def test_refuses_a_mean_in_another_type() -> None:
    w = Writer("m", 8)
    y = rms(w, w.x, mean_square(w, dtype=F64))
    assert refused(w.done(w.static(y)), m=3) is MissCode.DTYPE


def test_refuses_a_sum_instead_of_a_mean() -> None:
    w = Writer("m", 8)
    v = w.call(aten.sum.dim_IntList, w.mul(w.x, w.x), [-1], True)
    assert refused(w.done(w.static(rms(w, w.x, v))), m=3) is MissCode.PATTERN


def test_refuses_the_mean_of_something_else_than_squares() -> None:
    w = Writer("m", 8)
    v = w.call(aten.mean.dim, w.call(aten.pow.Tensor_Scalar, w.x, 4), [-1], True)
    assert refused(w.done(w.static(rms(w, w.x, v))), m=3) is MissCode.PATTERN


def test_refuses_the_mean_square_of_another_tensor() -> None:
    w = Writer("m", 8)
    other = w.arg("other")
    v = w.call(aten.mean.dim, w.mul(other, other), [-1], True)
    assert refused(w.done(w.static(rms(w, w.x, v))), m=3) is MissCode.PATTERN


def test_refuses_the_mean_square_of_what_was_rounded() -> None:
    w = Writer("m", 8)
    narrow = w.cast(w.cast(w.x, BF16), F32)
    v = w.call(aten.mean.dim, w.mul(narrow, narrow), [-1], True)
    assert refused(w.done(w.static(rms(w, w.x, v))), m=3) is MissCode.PATTERN


@pytest.mark.parametrize("eps", [-1e-5, float("inf"), float("nan")])
def test_refuses_an_eps_that_is_none(eps: float) -> None:
    w = Writer("m", 8)
    y = rms(w, w.x, mean_square(w), eps)
    assert refused(w.done(w.static(y)), m=3) is MissCode.ARGUMENT


def test_refuses_an_eps_that_is_scaled() -> None:
    w = Writer("m", 8)
    y = rms(w, w.x, mean_square(w), 1e-5, alpha=2)
    assert refused(w.done(w.static(y)), m=3) is MissCode.ARGUMENT


def test_refuses_an_eps_that_is_computed() -> None:
    w = Writer("m", 8)
    y = rms(w, w.x, mean_square(w), w.b.arg("eps", F32))
    assert refused(w.done(w.static(y)), m=3) is MissCode.NOT_CONSTANT


def test_refuses_an_eps_that_the_type_cannot_hold() -> None:
    w = Writer("m", 8, dtype=BF16)
    y = rms(w, w.x, mean_square(w), w.const(torch.tensor(1e-5)))
    assert refused(w.done(w.static(y)), m=3) is MissCode.DTYPE


def test_refuses_an_eps_that_promotes() -> None:
    w = Writer("m", 8)
    y = rms(w, w.x, mean_square(w), w.const(torch.full((1,), 1e-5, dtype=F64)))
    assert refused(w.done(w.static(y)), m=3) is MissCode.DTYPE


def test_refuses_a_root_without_eps() -> None:
    w = Writer("m", 8)
    y = w.mul(w.x, w.call(aten.rsqrt.default, mean_square(w)))
    assert refused(w.done(w.static(y)), m=3) is MissCode.PATTERN


@pytest.mark.parametrize("correction", [1, 2, 0.5])
def test_refuses_the_variance_of_a_sample(correction: float) -> None:
    w = Writer("m", 8)
    centred = w.call(aten.sub.Tensor, w.x, w.call(aten.mean.dim, w.x, [-1], True))
    v = w.call(aten.var.correction, w.x, [-1], correction=correction, keepdim=True)
    assert refused(w.done(w.static(rms(w, centred, v))), m=3) is MissCode.ARGUMENT


def test_refuses_the_default_variance() -> None:
    w = Writer("m", 8)
    centred = w.call(aten.sub.Tensor, w.x, w.call(aten.mean.dim, w.x, [-1], True))
    v = w.call(aten.var.dim, w.x, [-1], True, True)
    assert refused(w.done(w.static(rms(w, centred, v))), m=3) is MissCode.ARGUMENT


def test_refuses_a_deviation_of_what_is_not_centred() -> None:
    w = Writer("m", 8)
    v = w.call(aten.var.dim, w.x, [-1], False, True)
    assert refused(w.done(w.static(rms(w, w.x, v))), m=3) is MissCode.PATTERN


def test_refuses_mean_and_variance_over_other_axes() -> None:
    w = Writer("m", 3, 8)
    centred = w.call(aten.sub.Tensor, w.x, w.call(aten.mean.dim, w.x, [-2, -1], True))
    v = w.call(aten.var.dim, w.x, [-1], False, True)
    assert refused(w.done(w.static(rms(w, centred, v))), m=3) is MissCode.AXIS


def test_refuses_mean_and_variance_in_other_types() -> None:
    w = Writer("m", 8, dtype=BF16)
    centred = w.call(aten.sub.Tensor, w.x, w.call(aten.mean.dim, w.x, [-1], True))
    v = w.call(aten.var.dim, w.cast(w.x, F32), [-1], False, True)
    assert refused(w.done(w.static(rms(w, centred, v))), m=3) is MissCode.DTYPE


def test_refuses_the_deviation_of_another_tensor() -> None:
    w = Writer("m", 8)
    centred = w.call(aten.sub.Tensor, w.x, w.call(aten.mean.dim, w.x, [-1], True))
    v = w.call(aten.var.dim, w.arg("other"), [-1], False, True)
    assert refused(w.done(w.static(rms(w, centred, v))), m=3) is MissCode.PATTERN


def test_refuses_a_factor_that_is_rounded_for_a_wider_product() -> None:
    w = Writer("m", 8)
    v = w.call(aten.add.Tensor, mean_square(w), 1e-5)
    y = w.mul(w.x, w.cast(w.call(aten.rsqrt.default, v), BF16))
    assert refused(w.done(w.static(y)), m=3) is MissCode.DTYPE


def test_refuses_two_roundings_at_the_end() -> None:
    w = Writer("m", 8, dtype=BF16)
    y = w.cast(w.cast(w.spelled(Spelling(wide=F32)), BF16), F32)
    # The inner cast is the end of a norm; that it is read by a cast alone does not help.
    program = w.done(w.static(y))
    assert not applied(program, FuseNormQuantize, m=3).modified


def test_refuses_a_whole_norm_that_is_rounded_twice() -> None:
    w = Writer("m", 8, dtype=BF16)
    y = w.cast(w.call(aten.rms_norm.default, w.x, [8], None, 1e-5), F32)
    assert refused(w.done(w.static(y)), m=3) is MissCode.DTYPE


def test_refuses_a_bias_of_an_rms_norm() -> None:
    w = Writer("m", 8)
    y = w.spelled(Spelling(bias=True))
    assert refused(w.done(w.static(y)), m=3) is MissCode.PATTERN


@pytest.mark.parametrize("residual", [True, False])
def test_the_reason_tells_a_residual_from_a_bias(residual: bool) -> None:
    w = Writer("m", 8)
    y = w.spelled(Spelling())
    other = w.x if residual else w.const(torch.randn(8))
    program = w.done(w.static(w.call(aten.add.Tensor, y, other)))

    miss = only_miss(program, FuseNormQuantize, context=None, m=3)
    assert miss.code is MissCode.PATTERN
    assert ("a residual is added after the norm" in miss.reason) == residual


@pytest.mark.parametrize("alpha", [2, 0.5])
def test_refuses_a_bias_that_is_scaled(alpha: float) -> None:
    w = Writer("m", 8)
    y = w.spelled(Spelling(centre="once"))
    y = w.call(aten.add.Tensor, y, w.const(torch.randn(8)), alpha=alpha)
    result = applied(program := w.done(w.static(y)), FuseNormQuantize, m=3)
    assert not result.modified, to_text(program.graph)


@pytest.mark.parametrize("number", [2, 0.5])
def test_refuses_a_norm_that_is_multiplied_by_a_number(number: float) -> None:
    w = Writer("m", 8)
    y = w.call(aten.mul.Tensor, w.spelled(Spelling()), number)
    assert not applied(w.done(w.static(y)), FuseNormQuantize, m=3).modified


def test_refuses_a_weight_that_enlarges() -> None:
    w = Writer("m", 8)
    y = w.mul(w.spelled(Spelling(weight="none")), w.const(torch.randn(3, 1, 8)))
    assert refused(w.done(w.static(y)), m=3) is MissCode.SHAPE


@pytest.mark.parametrize("dtype", [F16, F32])
def test_refuses_a_scalar_that_one_side_rounds(dtype: torch.dtype) -> None:
    w = Writer("m", 8, dtype=BF16)
    y = w.spelled(Spelling(weight="scalar", weight_dtype=dtype))
    assert refused(w.done(w.static(y)), m=3) is MissCode.DTYPE


def test_refuses_a_norm_times_itself() -> None:
    w = Writer("m", 8)
    y = w.spelled(Spelling(weight="none"))
    assert refused(w.done(w.static(w.mul(y, y))), m=3) is MissCode.PATTERN
