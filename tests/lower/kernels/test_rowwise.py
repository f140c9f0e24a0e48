"""Norms and activations that give codes, on the kernels of rows: what they take, and what not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.support.cases.lowering import NO_KERNELS

from qfuse import kernels
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Lowered
from qfuse.ir.graph.stage_graph import LoweredGraph, OptimizedGraph
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.norm_spec import NormSpec, Root, Statistic
from qfuse.ir.quant.choose import ChooseSpec, Formula
from qfuse.ir.quant.spec import Arithmetic, QuantSpec, ZeroPointDomain
from qfuse.lower import lower
from qfuse.lower.kernels.registry import all_kernels, linear_kernels
from qfuse.rewrite.clone import clone
from qfuse.targets import Target
from qfuse.testing.build import GraphBuilder
from qfuse.testing.run import random_inputs, run

pytestmark = pytest.mark.numeric

F32, BF16 = torch.float32, torch.bfloat16
NORM = NormSpec(1, 1e-6, F32, F32, F32, F32)
WHOLE = replace(NORM, statistic=Statistic.WHOLE)
SPEC = QuantSpec(
    torch.int8, -128, 127, (1, 1, None), F32, Arithmetic(F32, True, False), ZeroPointDomain.INT
)
CHOOSE = ChooseSpec(Formula.AO_SYMMETRIC, torch.int8, -128, 127, (1, 1, None), 1e-6)
BYTES = QuantSpec(torch.int8, -128, 127, (None, None, None))
KIND = {"rms_norm": ops.rms_norm, "layer_norm": ops.layer_norm, "activation": ops.activation}


@dataclass(frozen=True)
class Case:
    """One fused op on an input of 8 by 512 rows of 70, big enough for any kernel to pay."""

    kind: str = "rms_norm"
    norm: NormSpec = NORM
    spec: QuantSpec = SPEC
    choose: ChooseSpec | None = CHOOSE
    x: torch.dtype = F32
    residual: torch.dtype | None = None
    vectors: tuple[torch.dtype | None, ...] = (F32,)
    vector_shape: tuple[int, ...] = (70,)
    epilogue: str = "act(silu)|mul(0)"
    gate: tuple[int | str, ...] = ("b", 512, 70)
    keep: str = ""
    lead: tuple[int | str, ...] = ("b", 512)
    options: dict[str, Any] = field(default_factory=dict)
    stored: QuantSpec | None = None
    stored_residual: QuantSpec | None = None

    def program(self) -> OptimizedGraph:
        """A graph of the op and all its results."""
        b = GraphBuilder()
        operands = self._source(b, "x", self.x, self.stored)
        if self.kind == "activation":
            gate = [b.arg("gate", self.x, *self.gate)] if self.epilogue and self.gate else []
            operands += [self.epilogue, gate]
        else:
            operands += self._source(b, "residual", self.residual, self.stored_residual)
            wanted = (*self.vectors, None)[: 1 if self.kind == "rms_norm" else 2]
            for index, dtype in enumerate(wanted):
                value = torch.randn(self.vector_shape)
                operands.append(None if dtype is None else b.const(f"v{index}", value.to(dtype)))
            operands.append(str(self.norm))
        scale = b.const("scale", torch.tensor([[[0.031]]]))
        zero = b.const("zero", torch.tensor([[[3]]], dtype=torch.int32))
        given = (scale, zero) if self.choose is None else (None, None)
        choose = "" if self.choose is None else str(self.choose)
        node = b.call(KIND[self.kind], *operands, *given, str(self.spec), choose, self.keep)
        count = len(node.meta["val"])
        return b.done(*(b.item(node, i) for i in range(count)), stage=OptimizedGraph)

    def _source(
        self, b: GraphBuilder, name: str, dtype: torch.dtype | None, spec: QuantSpec | None
    ) -> list[Any]:
        """Add an operand: itself, its scale and zero point, and its spec."""
        if spec is None:
            x = None if dtype is None else b.arg(name, dtype, *self.lead, 70)
            return [x, None, None, ""]
        x = b.arg(name, spec.dtype, *self.lead, 70)
        if any(size is not None for size in spec.block):
            sizes = zip((*self.lead, 70), spec.block, strict=True)
            grid = [size if block == 1 else 1 for size, block in sizes]
            scale = b.arg(f"{name}_scale", torch.float32, *grid)
            return [x, b.call(torch.ops.aten.abs.default, scale), None, str(spec)]
        scale = b.const(f"{name}_scale", torch.tensor([[[0.017]]], dtype=torch.float64))
        zero = b.const(f"{name}_zero", torch.tensor([[[7]]], dtype=torch.int32))
        return [x, scale, zero, str(spec)]


def lowered(
    program: OptimizedGraph,
    library: kernels.KernelLibrary | None = None,
    target: Target | None = None,
    *,
    loops: bool = True,
) -> LoweredGraph:
    """Lower a copy of ``program`` for a pinned machine."""
    library = kernels.load() if library is None else library
    linears = len(linear_kernels(library))
    rowwise = all_kernels(library)[linears:]
    cost = CostModel(CostProfile.pinned(), loops=loops)
    return lower(clone(program), target or Target.for_testing(), cost, rowwise)


def event_of(low: LoweredGraph) -> Lowered:
    """Return what became of the only op."""
    (event,) = low.log.of(Lowered)
    return event


def static(*, float_dtype: torch.dtype = F32) -> dict[str, Any]:
    return {
        "choose": None,
        "spec": replace(SPEC, block=(None, None, None), float_dtype=float_dtype),
    }


pytestmark = pytest.mark.own_kernels


TAKEN = {
    "rms norm": Case(),
    "rms norm, everything kept": Case(residual=F32, keep="float|sum"),
    "rms norm, sum kept": Case(residual=F32, keep="sum"),
    "rms norm, float kept": Case(keep="float"),
    "rms norm without weight": Case(vectors=(None,)),
    "rms norm by given parameters": Case(**static()),
    "rms norm by division": Case(norm=replace(NORM, root=Root.DIVIDE)),
    "llama in bf16": Case(
        x=BF16,
        norm=replace(NORM, rounded=BF16, out=BF16),
        vectors=(BF16,),
        spec=replace(SPEC, float_dtype=BF16),
    ),
    "gemma in bf16": Case(x=BF16, norm=replace(NORM, out=BF16), spec=replace(SPEC, float_dtype=BF16)),
    "residual of another type": Case(x=BF16, residual=F32, keep="sum"),
    "weight of all ranks": Case(vector_shape=(1, 1, 70)),
    "layer norm": Case("layer_norm", WHOLE, vectors=(F32, F32)),
    "layer norm without vectors": Case("layer_norm", WHOLE, vectors=(None, None), keep="float"),
    "layer norm by hand": Case(
        "layer_norm", replace(NORM, statistic=Statistic.VARIANCE), vectors=(F32, F32)
    ),
    "swiglu": Case("activation"),
    "swiglu in bf16": Case("activation", x=BF16, spec=replace(SPEC, float_dtype=BF16), keep="float"),
    "swiglu of halves": Case("activation", epilogue="glu(silu,gate-first)", gate=()),
    "geglu of halves": Case("activation", epilogue="glu(gelu,up-first)", gate=(), keep="float"),
    "only codes": Case("activation", epilogue=""),
    "rms norm of int8": Case(stored=BYTES, keep="float"),
    "rms norm of uint8": Case(stored=replace(BYTES, dtype=torch.uint8, quant_min=0, quant_max=255)),
    "rms norm of rows": Case(stored=replace(BYTES, block=(1, 1, None)), keep="float"),
    "rms norm of int8 and floats": Case(stored=BYTES, residual=F32, keep="float|sum"),
    "rms norm of floats and int8": Case(stored_residual=BYTES, keep="sum"),
    "rms norm of bytes and bytes": Case(
        stored=BYTES, stored_residual=replace(BYTES, block=(1, 1, None)), keep="float|sum"
    ),
    "rms norm of bfloat16 in int8": Case(
        stored=replace(BYTES, float_dtype=BF16), residual=F32, keep="float|sum"
    ),
    "layer norm of int8": Case("layer_norm", WHOLE, stored=BYTES, vectors=(F32, F32), keep="float"),
    "activation of int8": Case("activation", stored=BYTES, keep="float"),
    "squared relu": Case("activation", epilogue="act(squared_relu)", gate=(), keep="float"),
    "asymmetric bytes": Case(
        spec=replace(SPEC, dtype=torch.uint8, quant_min=0, quant_max=255),
        choose=replace(
            CHOOSE, formula=Formula.AO_ASYMMETRIC, dtype=torch.uint8, quant_min=0, quant_max=255
        ),
    ),
    "one row per call": Case(lead=(1, 4096), spec=replace(SPEC, block=(None, 1, None)),
                             choose=replace(CHOOSE, block=(None, 1, None))),
}  # fmt: skip

REFUSED = {
    "its scale is computed for blocks": Case(
        spec=replace(SPEC, block=(1, None, None)), choose=replace(CHOOSE, block=(1, None, None))
    ),
    "its result is scaled in blocks": Case(choose=None, spec=replace(SPEC, block=(None, 1, None))),
    "its result is stored as int16": Case(
        spec=replace(SPEC, dtype=torch.int16), choose=replace(CHOOSE, dtype=torch.int16)
    ),
    "another range": Case(choose=replace(CHOOSE, quant_min=-127)),
    "its zero point is a float offset": Case(
        spec=replace(SPEC, domain=ZeroPointDomain.FLOAT_OFFSET)
    ),
    "its input is float64": Case(
        x=torch.float64, norm=replace(NORM, compute=torch.float64, out=torch.float64),
        spec=replace(SPEC, float_dtype=torch.float64),
    ),
    "it is over 2 axes": Case(norm=replace(NORM, axes=2), vector_shape=(1, 1, 70)),
    "it computes in bfloat16": Case(x=BF16, norm=replace(NORM, compute=BF16)),
    "rounds to bfloat16 and then to float32": Case(
        x=BF16, norm=replace(NORM, rounded=BF16), vectors=(BF16,)
    ),
    "not have one element per column": Case(vector_shape=(1,)),
    "its weight or bias is float64": Case(vectors=(torch.float64,)),
    "before the weight": Case(
        "layer_norm", replace(NORM, statistic=Statistic.VARIANCE, rounded=BF16),
        vectors=(F32, F32),
    ),
    "rounds to bfloat16 and then": Case(
        "layer_norm", replace(WHOLE, compute=BF16), vectors=(BF16, BF16)
    ),
    "broadcast to the input": Case("activation", gate=(1, 1, 70)),
    "it does not support all of glu": Case("activation", epilogue="glu(silu,gate-first)|mul(0)",
                                        gate=("b", 512, 35)),
    "it does not support all of act": Case(
        "activation", epilogue=f"act(silu)|mul(0,0,-,{SPEC})", **static()
    ),
    "both halves of its input are quantized": Case(
        "activation", stored=BYTES, epilogue="glu(silu,gate-first)", gate=(),
        spec=replace(SPEC), choose=CHOOSE,
    ),
    "the input is stored as int16": Case(
        stored=replace(BYTES, dtype=torch.int16, quant_min=-300, quant_max=300)
    ),
    "the input is scaled in blocks": Case(stored=replace(BYTES, block=(None, 1, None))),
    "the residual's zero point is a float offset": Case(
        stored_residual=replace(BYTES, domain=ZeroPointDomain.FLOAT_OFFSET)
    ),
    "the input is dequantized in bfloat16": Case(
        stored=replace(BYTES, arithmetic=Arithmetic(BF16))
    ),
    "compiled loops": Case(lead=(1, 1)),
    "predicted": Case("activation", **static()),
}  # fmt: skip


@pytest.mark.isa("avx2")  # There is no portable rowwise kernel.
@pytest.mark.parametrize("name", TAKEN)
def test_what_a_kernel_takes_it_computes(name: str) -> None:
    case = TAKEN[name]
    program = case.program()
    low = lowered(program)
    assert event_of(low).kernel == f"qfuse.{case.kind}_quantized"
    inputs = random_inputs(program, b=3)
    before = [t.clone() for t in inputs]
    new, old = run(low, inputs), run(program, inputs)
    for mine, want in zip(new, old, strict=True):
        assert (mine.dtype, mine.shape) == (want.dtype, want.shape)
        if mine.dtype in {torch.int8, torch.uint8}:
            # A last bit of the statistics moves what stands at a tie by one code.
            steps = (mine.int() - want.int()).abs()
            assert steps.max() <= 1
            assert steps.float().mean() < 0.01
        else:
            eps = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0
            torch.testing.assert_close(mine, want, rtol=4 * eps, atol=1e-6)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_take_is_expanded_with_a_reason(reason: str) -> None:
    case = REFUSED[reason]
    program = case.program()
    low = lowered(program, replace(kernels.load(), instruction_sets=("portable", "avx2")))
    event = event_of(low)
    assert event.kernel == "expand"
    assert reason in dict(event.losers)[f"qfuse.{case.kind}_quantized"]
    inputs = random_inputs(program, b=3)
    for mine, want in zip(run(low, inputs), run(program, inputs), strict=True):
        assert torch.equal(mine, want)


def test_a_machine_without_kernels_or_vectors_says_so() -> None:
    program = Case().program()
    event = event_of(lowered(program, NO_KERNELS))
    assert (event.kernel, event.losers[0][1]) == ("expand", NO_KERNELS.reason)
    plain = replace(kernels.load(), instruction_sets=("portable",))
    assert "no supported vector instructions" in event_of(lowered(program, plain)).losers[0][1]
    cuda = replace(Target.for_testing(), device="cuda")
    assert "the target is cuda" in event_of(lowered(program, target=cuda)).losers[0][1]


@pytest.mark.isa("avx2")  # There is no portable rowwise kernel.
def test_results_keep_their_order_of_memory() -> None:
    b = GraphBuilder()
    x = b.call(torch.ops.aten.permute.default, b.arg("x", F32, 70, 8, 512), [1, 2, 0])
    spec = replace(SPEC, block=(None, None, None))
    scale = b.const("scale", torch.tensor([[[0.031]]]))
    plain = (None, None, "")
    args = (x, *plain, None, *plain, None, str(NORM), scale, None, str(spec), "", "float")
    node = b.call(ops.rms_norm, *args)
    y = b.call(torch.ops.aten.permute.default, b.item(node, 1), [2, 0, 1])
    flat = b.call(torch.ops.aten.view.default, y, [-1])
    program = b.done(b.item(node, 0), flat, stage=OptimizedGraph)
    low = lowered(program)
    assert "not row-major" in event_of(low).losers[0][1]
    inputs = random_inputs(program)
    for mine, want in zip(run(low, inputs), run(program, inputs), strict=True):
        assert torch.equal(mine, want)
        assert mine.stride() == want.stride()


@pytest.mark.isa("avx2")  # There is no portable rowwise kernel.
def test_without_a_compiler_no_loops_are_expected() -> None:
    low = lowered(REFUSED["compiled loops"].program(), loops=False)
    assert event_of(low).kernel.startswith("qfuse.")

    event = event_of(lowered(REFUSED["it is over 2 axes"].program(), loops=False))
    assert (event.kernel, event.why) == (
        "expand",
        "the backend compiles nothing, so it runs op by op",
    )
