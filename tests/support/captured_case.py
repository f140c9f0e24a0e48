"""Captured graphs with what they are run on, and what the whole pipeline must keep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import currently_in_test_context, event
from tests.support import summary
from tests.support.cases.lowering import NO_KERNELS
from tests.support.machine import onednn_has_amx
from tests.support.sources.dialects import strides
from torch.fx import GraphModule, Interpreter, Node

from qfuse import kernels
from qfuse.backends import CompiledModule, compile_graph
from qfuse.cost import CostModel, CostProfile
from qfuse.ir.events import Exactness, Noted, RolledBack
from qfuse.ir.graph.schema import is_call
from qfuse.ir.graph.stage_graph import CapturedGraph, InputSpec, op_name
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops.convolution import as_convolution
from qfuse.ir.ops.views import dtype_of, shape_of
from qfuse.ir.signature.run import run_flat
from qfuse.ir.stages.verify import verify
from qfuse.model_check import ModelCheck
from qfuse.options import Check
from qfuse.pipeline import Pipeline, Plan
from qfuse.rewrite.compare import compare
from qfuse.rewrite.tolerance import SITE
from qfuse.targets import Target

aten = torch.ops.aten

MOST_IDS = 11
"""Inputs of int64 are indices below this."""
_HALF = 2
# They round by way of integers.
_FAKE_QUANTIZE = (
    aten.fake_quantize_per_tensor_affine.default,
    aten.fake_quantize_per_channel_affine.default,
)


@dataclass(frozen=True)
class CapturedCase:
    """A graph and the inputs that it is run on.

    Attributes:
        program: The graph.
        sizes: Values of its symbolic sizes, for a first and a second input.
        exact: Whether every sum in it is exact in float32, in any order.
        seed: Of the inputs.
    """

    program: CapturedGraph
    sizes: tuple[Mapping[str, int], Mapping[str, int]]
    exact: bool
    seed: int

    def __repr__(self) -> str:
        text = to_text(self.program.graph)
        return f"CapturedCase(exact={self.exact}, sizes={self.sizes}, seed={self.seed}):\n{text}\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis prints dataclasses field by field unless they say otherwise."""
        del cycle
        printer.text(repr(self))

    def unlike(self, which: int = 0) -> frozenset[Node]:
        """The values that torch lays out unlike the fake ones, and all that is computed from one.

        Ops that compute element by element drop the strides of axes of size one, by which torch tells
        channels-last, and their fake versions do not; `max_pool1d` returns a contiguous tensor, and
        its fake version one that lies as the image does. A rewrite then goes by another layout than
        the source has.
        """
        inputs = list(self.program.graph.find_nodes(op="placeholder"))
        known = {
            size.node.expr: self.sizes[which][name]
            for node, spec in zip(inputs, self.program.signature.inputs, strict=True)
            for size, name in zip(shape_of(node), spec.shape, strict=True)
            if isinstance(size, torch.SymInt) and isinstance(name, str)
        }
        watched = _Watched(self.program.module, known)
        with torch.no_grad():
            watched.run(*self.inputs(which))
        found: set[Node] = set()
        for node in self.program.graph.nodes:
            if node in watched.unlike or found & set(node.all_input_nodes):
                found.add(node)
        return frozenset(found)

    @property
    def rounded(self) -> frozenset[Node]:
        """The values whose bits torch leaves to the order of sums though their numbers are exact.

        Its transposed convolution of 16-bit floats rounds partial sums to 16 bits, as many as its
        blocks have. All that is computed from one counts.
        """
        found: set[Node] = set()
        for node in self.program.graph.nodes:
            conv = as_convolution(node)
            first = conv is not None and conv.transposed and dtype_of(node).itemsize == _HALF
            if first or found & set(node.all_input_nodes):
                found.add(node)
        return frozenset(node for node in found if node.op != "output")

    def undefined(self, which: int = 0) -> str:
        """Why the values of the source are not defined for the first or the second input, or "".

        What an integer is made of that is no number, or is infinite, is left to the machine. No
        input is such a value, but a sum of 16 bits may be too large, and a row of zeros divided by
        its scale.
        """
        found = _Undefined(self.program.module)
        with torch.no_grad():
            found.run(*self.inputs(which))
        return f"{found.where} makes integers of infinite or NaN values" if found.where else ""

    @property
    def unreliable(self) -> str:
        """Why the values of the source are left to chance on this machine, or "".

        Seen with torch 2.13: its bfloat16 convolutions with AMX read uninitialized memory.
        """
        if not onednn_has_amx():
            return ""
        for node in self.program.graph.nodes:
            conv = as_convolution(node)
            if conv is None or dtype_of(node) is not torch.bfloat16:
                continue
            stride, column = conv.settings["stride"], shape_of(node)[-1]
            steps = stride if isinstance(stride, int) else stride[-1]  # type: ignore[index]
            if steps != 1 and (isinstance(column, torch.SymInt) or column == 1):
                return "torch's bfloat16 convolution to one column reads uninitialized memory"
        return ""

    def inputs(self, which: int = 0) -> list[torch.Tensor]:
        """The first or the second input, the same one every time."""
        random = torch.Generator().manual_seed(self.seed + which)
        return [
            draw_input(spec, self.sizes[which], random, exact=self.exact)
            for spec in self.program.signature.inputs
        ]


def draw_input(
    spec: InputSpec, sizes: Mapping[str, int], random: torch.Generator, *, exact: bool
) -> torch.Tensor:
    """A tensor for an input, in its layout; a multiple of 1/8 if sums must be exact."""
    shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
    dtype = spec.dtype
    assert dtype is not None, "every input is a tensor"
    if dtype is torch.int64:
        value = torch.randint(0, MOST_IDS, shape, generator=random)
    elif not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        value = torch.randint(info.min, info.max + 1, shape, generator=random)
    elif exact:
        value = torch.randint(-127, 128, shape, generator=random) / 8
    else:
        value = torch.randn(shape, generator=random)
    order = spec.order or tuple(range(len(shape)))
    stored = torch.empty([shape[axis] for axis in order], dtype=dtype)
    # Also the strides of axes of size one are those of the layout: torch looks at them.
    return stored.permute([order.index(axis) for axis in range(len(order))]).copy_(value)


def assert_kept(case: CapturedCase, own: bool) -> None:
    """Assert that the compiled graph does what the source does, for both inputs."""
    # Bits tell by themselves; what is rounded is checked where it is rewritten, since a value that
    # flips in one layer is not held against the layers after it.
    check = Check.OFF if case.exact and not case.rounded else Check.SITE
    if case.unreliable and currently_in_test_context():
        event(f"{summary.SKIPPED}{case.unreliable}")
        return
    defined = [which for which in (0, 1) if _is_defined(case, which)]
    if 0 not in defined:
        return
    plan = _planned(case.program, case.inputs(), own, check)
    model = CompiledModule(plan.lowered.signature, compile_graph(plan.lowered, backend="eager"))
    for which in defined:
        _assert_alike(case, model, which, plan)


def assert_same_but_zeros(new: torch.Tensor, old: torch.Tensor, what: str, plan: Plan) -> None:
    """Assert equal bits, but for the signs of zeros: a sum of integers has one zero."""
    verdict = compare(_one_zero(new), _one_zero(old), None, Exactness.EXACT, SITE)
    assert verdict.wrong is None, f"{what}: {verdict.wrong}\n{plan}"


def called(
    model: CompiledModule, program: CapturedGraph, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Call it twice; the answers are the same, and neither inputs nor constants are written to."""
    held = [*inputs, *program.module.buffers()]
    before = [t.clone() for t in held]
    first, second = model(*inputs), model(*inputs)
    assert all(map(same_values, first, second)), "a second call gives another answer"
    assert all(map(same_values, before, held)), "a functional graph wrote to what it reads"
    return list(first)


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal values; a NaN equals a NaN."""
    # Float8 has no comparison of its own.
    a, b = a.double(), b.double()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _is_defined(case: CapturedCase, which: int) -> bool:
    why = case.undefined(which)
    if why and currently_in_test_context():
        event(f"{summary.SKIPPED}the values of an input are not compared: {why}")
    return not why


class _Watched(Interpreter):
    """Runs a graph and notes which values have other strides than their fake ones."""

    def __init__(self, module: GraphModule, sizes: Mapping[Any, int]) -> None:
        super().__init__(module)
        self._sizes = sizes
        self.unlike: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        fake = n.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor):
            return value
        if value.stride() != tuple(map(self._number, fake.stride())):
            self.unlike.add(n)
        return value

    def _number(self, size: int | torch.SymInt) -> int:
        return size if isinstance(size, int) else int(size.node.expr.subs(self._sizes))


class _Undefined(Interpreter):
    """Runs a graph and notes the first op that makes integers of values that are not finite."""

    where = ""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if not self.where and (_has_integers(value) or is_call(n, *_FAKE_QUANTIZE)):
            given = [self.env[source] for source in n.all_input_nodes]
            if not all(map(_is_finite, given)):
                self.where = op_name(n)
        return value


def _has_integers(value: object) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    return any(not (t.is_floating_point() or t.dtype is torch.bool) for t in tensors)


def _is_finite(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    return bool(value.double().isfinite().all())


def _planned(
    program: CapturedGraph, inputs: Sequence[torch.Tensor], own: bool, check: Check
) -> Plan:
    """Rewrite the graph; no rewrite may have to be undone."""
    verify(program)
    library = kernels.load() if own else NO_KERNELS
    cost = CostModel(CostProfile.pinned())
    plan = Pipeline(Target.for_testing(), cost, library, check).plan(program, inputs)
    undone = plan.lowered.log.of(RolledBack)
    assert not undone, "\n".join(f"{e.key}: {e.reason}" for e in undone)
    bugs = [e.text for e in plan.lowered.log.of(Noted) if "which is a bug" in e.text]
    assert not bugs, "\n".join(bugs)
    return plan


def _assert_alike(case: CapturedCase, model: CompiledModule, which: int, plan: Plan) -> None:
    """Assert the values and the strides of the source for one of its inputs."""
    inputs = case.inputs(which)
    new = called(model, case.program, inputs)
    old = [value for value in run_flat(case.program.module, inputs) if value is not None]
    rounded = case.rounded
    has_bits = [case.exact and node not in rounded for node in _results(case.program)]
    unlike = case.unlike(which)
    has_layout = [node not in unlike for node in _results(case.program)]
    if not all(has_layout) and currently_in_test_context():
        event(f"{summary.SKIPPED}strides of an output are not compared: torch's are not the fake's")
    checks = zip(new, old, has_bits, has_layout, strict=True)
    for index, (a, b, bits, layout) in enumerate(checks):
        if layout:
            assert strides(a) == strides(b), f"output {index}: {a.stride()} {b.stride()}\n{plan}"
        if bits:
            assert_same_but_zeros(a, b, f"output {index}", plan)
    if not all(has_bits):
        # Planning measured the first input.
        known = plan.reference if which == 0 else None
        verdict = (known or ModelCheck.measure(case.program, inputs)).judge(new)
        assert verdict.wrong is None, f"{verdict.wrong}\n{plan}"


def _results(program: CapturedGraph) -> list[Node]:
    """The nodes that leave the graph."""
    outs: Any = program.graph.output_node().args[0]
    return [node for node in outs if node is not None]


def _one_zero(x: torch.Tensor) -> torch.Tensor:
    """Give every zero the same sign."""
    return torch.where(x.double() == 0, torch.zeros_like(x), x) if x.is_floating_point() else x
