"""Batch norms of quantized values whose result is quantized: one op with a product and a sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import Graph, spec_of
from torch.fx import Node

from qfuse.ir.events import MissCode
from qfuse.ir.graph.stage_graph import NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.activation import as_activation
from qfuse.ir.sizes import same_strides
from qfuse.optimize.fuse.activation import FuseActivationQuantize
from qfuse.optimize.images.batch_norm import FuseStoredBatchNorm
from qfuse.rewrite.clone import clone
from qfuse.rewrite.context import PassResult
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.prelude import Miss, aten
from qfuse.testing.run import random_inputs, run

pytestmark = pytest.mark.numeric

NATIVE, PLAIN = aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default
C = 5
LAST = (0, 2, 3, 1)


class Norms(Graph):
    """A graph of quantized images and norms."""

    def __init__(self, *shape: int | str, dtype: torch.dtype = torch.uint8, **order: Any) -> None:
        super().__init__(1)
        self.shape = shape or ("n", C, "h", "w")
        self.q = self.b.arg("q", dtype, *self.shape, **order)
        self.dtype = dtype

    def image(self, block: tuple[int | None, ...] | None = None, **changes: Any) -> Node:
        """The quantized values as floats."""
        spec = spec_of(*(block or (None,) * len(self.shape)), dtype=self.dtype, **changes)
        return self.dequantize(self.q, spec, self.params(self.q, spec))

    def norm(self, x: Node, *, plain: bool = True, **changes: Any) -> Node:
        """A norm of ``x``; ``changes`` replace its statistics or parameters."""
        known = {"g": torch.randn(C), "b": torch.randn(C), "mean": torch.randn(C)}
        known["var"] = torch.rand(C) + 0.1
        given = [self.constant(changes.get(name, value), name) for name, value in known.items()]
        if changes.get("runtime"):
            given[2] = self.b.arg("mean", torch.float32, C)
        if plain:
            training = changes.get("training", False)
            return self.call(PLAIN, x, *given, training, 0.1, 1e-5, False)
        call = self.call(NATIVE, x, *given, 0.1, 1e-5)
        if changes.get("statistics"):
            self.b.item(call, 1)
        return self.b.item(call, 0)

    def quantized(self, y: Node, dtype: torch.dtype = torch.int8, **changes: Any) -> Node:
        """Quantized with one scale."""
        block = changes.pop("block", (None,) * len(self.shape))
        spec = spec_of(*block, dtype=dtype, float_dtype=y.meta["val"].dtype, **changes)
        return self.quantize(y, spec, self.params(y, spec))


def fuse(program: NormalGraph, **sizes: int) -> PassResult:
    """Fuse; quantized values are at most one step off and rarely, and strides stay."""
    source = clone(program)
    result = apply_rules(program, [FuseActivationQuantize(), FuseStoredBatchNorm()])
    inputs = random_inputs(program, **sizes)
    for new, old in zip(run(program, inputs), run(source, inputs), strict=True):
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        assert same_strides(new, old)
        far = (new.double() - old.double()).abs()
        step = 0.0601 if old.is_floating_point() else 1
        assert bool((far <= step).all())
        assert int((far > 0).sum()) <= 1 + 0.001 * far.numel()
    return result


def epilogues(program: NormalGraph) -> list[str]:
    """The epilogues of the activations."""
    views = map(as_activation, program.graph.nodes)
    return [str(view.epilogue) for view in views if view is not None]


SIZES = {"n": 2, "h": 4, "w": 3}


def test_golden_the_norm_is_two_operands() -> None:
    g = Norms()
    program = g.done(g.quantized(g.norm(g.image())))

    assert fuse(program, **SIZES).fired == {"fuse-stored-batch-norm": 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[1]
%q: uint8[s0, 5, s1, s2]
const %scale1: float32[1, 1, 1, 1]
const %zero2: int32[1, 1, 1, 1]
const %scale7: float32[1, 1, 1, 1]
const %zero8: int32[1, 1, 1, 1]
const %batch_norm_default_factor: float32[5, 1, 1]
const %batch_norm_default_shift: float32[5, 1, 1]
%0 = qfuse.activation(%q, %scale1, %zero2, 'uint8[0,255] *x*x*x* float32 float32:reciprocal:round-zp int', 'mul(0)|add(1,1.0)', (%batch_norm_default_factor, %batch_norm_default_shift), %scale7, %zero8, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int', '', ''): (int8[s0, 5, s1, s2])
%1 = getitem(%0, 0): int8[s0, 5, s1, s2]
%2 = qfuse.dequantize(%1, %scale7, %zero8, 'int8[-128,127] *x*x*x* float32 float32:reciprocal:round-zp int'): float32[s0, 5, s1, s2]
%3 = aten.neg(%2): float32[s0, 5, s1, s2]
return (%3)""",
    )


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("source", [torch.int8, torch.uint8])
@pytest.mark.parametrize("target", [torch.int8, torch.uint8])
@pytest.mark.parametrize("channels_last", [False, True])
def test_both_spellings_dtypes_and_layouts(
    plain: bool, source: torch.dtype, target: torch.dtype, channels_last: bool
) -> None:
    order = {"order": LAST} if channels_last else {}
    g = Norms(2, C, 6, 7, dtype=source, **order)
    program = g.done(g.quantized(g.norm(g.image(), plain=plain), target))

    assert fuse(program).fired == {"fuse-stored-batch-norm": 1}
    assert epilogues(program) == ["mul(0)|add(1,1.0)"]


@pytest.mark.parametrize("shape", [(3, C), (2, C, 7), (2, C, 3, 4, 5), (0, C, 4, 4), (1, C, 1, 1)])
def test_other_ranks_and_sizes(shape: tuple[int, ...]) -> None:
    g = Norms(*shape)
    program = g.done(g.quantized(g.norm(g.image())))

    assert fuse(program).fired == {"fuse-stored-batch-norm": 1}


def test_a_scale_per_channel_and_other_users_of_the_floats() -> None:
    g = Norms()
    x = g.image((None, 1, None, None))
    program = g.done(g.quantized(g.norm(x)), x)

    assert fuse(program, **SIZES).fired == {"fuse-stored-batch-norm": 1}


@pytest.mark.parametrize("op", [aten.relu.default, aten.relu6.default, aten.hardswish.default])
@pytest.mark.parametrize("plain", [False, True])
def test_an_activation_behind_the_norm(op: Any, plain: bool) -> None:
    g = Norms()
    program = g.done(g.quantized(g.call(op, g.norm(g.image(), plain=plain))))

    fired = fuse(program, **SIZES).fired
    assert fired == {"fuse-activation-quantize": 1, "fuse-stored-batch-norm": 1}
    (text,) = epilogues(program)
    assert text.startswith("mul(0)|add(1,1.0)|act(")


def test_the_operands_of_the_activation_keep_their_indices() -> None:
    g = Norms(2, C, 3, 4)
    up = g.b.arg("up", torch.float32, 2, C, 3, 4)
    y = g.call(aten.mul.Tensor, g.call(aten.silu.default, g.norm(g.image())), up)
    program = g.done(g.quantized(y))

    fired = fuse(program).fired
    assert fired == {"fuse-activation-quantize": 1, "fuse-stored-batch-norm": 1}
    assert epilogues(program) == ["mul(1)|add(2,1.0)|act(silu)|mul(0)"]


def test_a_dense_block_reads_its_image_for_every_norm() -> None:
    g = Norms()
    x = g.image()
    program = g.done(g.quantized(g.norm(x)), g.quantized(g.norm(x)))

    assert fuse(program, **SIZES).fired == {"fuse-stored-batch-norm": 2}


def joined(g: Norms, **changes: Any) -> Node:
    """Two images with a scale each, joined as floats."""
    parts = []
    for name, channels in (("a", 2), ("b", C - 2)):
        dtype = changes.get(name, torch.uint8)
        q = g.b.arg(name, dtype, "n", channels, "h", "w")
        spec = spec_of(None, changes.get("block"), None, None, dtype=dtype)
        params: tuple[Node, Node | None] = g.params(q, spec)
        if changes.get("runtime") == name:
            params = (g.b.arg("scale", torch.float32, 1, 1, 1, 1), params[1])
        if changes.get("no_zero", "") in {name, "both"}:
            params = (params[0], None)
        parts.append(g.dequantize(q, spec, params))
    return g.call(aten.cat.default, parts, changes.get("dim", 1))


@pytest.mark.parametrize("changes", [{}, {"no_zero": "both"}, {"dim": -3}], ids=str)
def test_images_of_other_scales_are_joined_as_quantized_values(changes: dict[str, Any]) -> None:
    g = Norms()
    program = g.done(g.quantized(g.norm(joined(g, **changes))))

    assert fuse(program, **SIZES).fired == {"fuse-stored-batch-norm": 1}
    (op,) = filter(None, map(as_activation, program.graph.nodes))
    assert op.x.target is aten.cat.default
    assert op.x.meta["val"].dtype is torch.uint8
    assert op.x_params is not None
    assert op.x_params.spec.block_text() == "*x1x*x*"


def test_an_activation_behind_joined_images() -> None:
    g = Norms()
    program = g.done(g.quantized(g.call(aten.relu.default, g.norm(joined(g)))))

    fired = fuse(program, **SIZES).fired
    assert fired == {"fuse-activation-quantize": 1, "fuse-stored-batch-norm": 1}


@pytest.mark.parametrize(
    "changes", [{"a": torch.int8}, {"block": 1}, {"runtime": "a"}, {"no_zero": "b"}], ids=str
)
def test_refuses_images_that_are_quantized_in_other_ways(changes: dict[str, Any]) -> None:
    g = Norms()
    miss = refused(g, g.quantized(g.norm(joined(g, **changes))), **SIZES)
    assert miss.code is MissCode.NOT_QUANTIZED


def refused(g: Norms, *results: Node, **sizes: int) -> Miss:
    """The only refusal; nothing is fused."""
    program = g.done(*results)
    result = fuse(program, **sizes)
    assert not result.fired.get("fuse-stored-batch-norm")
    (miss,) = [miss for rule, miss in result.misses if "batch norm" not in rule]
    return miss


def test_refuses_normalized_values_with_other_users() -> None:
    g = Norms()
    y = g.norm(g.image())

    miss = refused(g, g.quantized(y), y, **SIZES)
    assert (miss.code, miss.reason) == (
        MissCode.SHARED,
        "the normalized values have other users",
    )


def test_refuses_a_float_input() -> None:
    g = Norms()
    x = g.call(aten._to_copy.default, g.q, dtype=torch.float32)

    miss = refused(g, g.quantized(g.norm(x)), **SIZES)
    assert (miss.code, miss.reason) == (
        MissCode.NOT_QUANTIZED,
        "the input of the norm is not quantized",
    )


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"training": True}, MissCode.ARGUMENT, "it computes statistics of its input"),
        (
            {"runtime": True},
            MissCode.NOT_CONSTANT,
            "its statistics or parameters are computed at run time",
        ),
        ({"g": torch.full((C,), float("nan"))}, MissCode.RANGE, "not finite"),
        ({"g": torch.full((C,), 3e38), "var": torch.full((C,), 1e-3)}, MissCode.RANGE, "float32"),
        ({"plain": False, "statistics": True}, MissCode.SHARED, "its statistics are used too"),
    ],
)
def test_refuses_other_norms(changes: dict[str, Any], code: MissCode, reason: str) -> None:
    g = Norms()
    y = g.quantized(g.norm(g.image(), **changes))
    program = g.done(y)
    result = apply_rules(program, [FuseStoredBatchNorm()])

    assert not result.modified
    (miss,) = [miss for _, miss in result.misses]
    assert miss.code is code
    assert reason in miss.reason


def test_refuses_values_that_are_an_operand_too() -> None:
    g = Norms(2, C, 3, 4)
    y = g.norm(g.image())
    z = g.call(aten.mul.Tensor, g.call(aten.silu.default, y), y)
    program = g.done(g.quantized(z))
    result = apply_rules(program, [FuseActivationQuantize(), FuseStoredBatchNorm()])

    assert "fuse-stored-batch-norm" not in result.fired


def test_refuses_narrow_floats() -> None:
    g = Norms()
    narrow = g.norm(g.image(float_dtype=torch.bfloat16))

    assert refused(g, g.quantized(narrow), **SIZES).code is MissCode.DTYPE
    g = Norms()
    y = g.norm(g.call(aten.neg.default, g.image()))
    assert refused(g, g.quantized(y), **SIZES).code is MissCode.NOT_QUANTIZED


def test_a_part_of_a_split_is_read_in_place() -> None:
    g = Norms(2, 2 * C, 3, 4, order=LAST)
    g.q = g.call(aten.slice.Tensor, g.q, 1, 0, C)
    g.shape = (2, C, 3, 4)
    program = g.done(g.quantized(g.norm(g.image())))

    assert fuse(program).fired == {"fuse-stored-batch-norm": 1}


def test_leaves_other_quantizes_alone() -> None:
    g = Norms()
    program = g.done(g.quantized(g.call(aten.neg.default, g.image())))
    result = apply_rules(program, [FuseStoredBatchNorm()])

    assert not result.modified
    assert not result.misses
