"""Random networks through the whole pipeline: captured, rewritten, compiled, and called."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.captured_case import CapturedCase, same_values
from tests.support.strategies.convolutions.in_place import writing_modules
from tests.support.strategies.sequences.cases import sequence_modules
from torch.fx import GraphModule

import qfuse
from qfuse.capture import capture
from qfuse.model_check import ModelCheck
from qfuse.targets import Target

pytestmark = [pytest.mark.property, pytest.mark.numeric, pytest.mark.own_kernels]

# They are compiled together, since most of the time is that of one call of a compiler.
NETWORKS = 10
DEFAULT = settings()
ONE = settings(max_examples=max(1, DEFAULT.max_examples // 100))

Drawn = tuple[CapturedCase, GraphModule]


class Networks(torch.nn.Module):
    """Several networks, each with inputs of its own, one after the other."""

    def __init__(self, drawn: list[Drawn]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(module for _, module in drawn)
        self.counts = [len(case.program.signature.inputs) for case, _ in drawn]

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Call each with its own inputs."""
        outs: list[torch.Tensor] = []
        first = 0
        for part, count in zip(self.parts, self.counts, strict=True):
            outs += part(*inputs[first : first + count])
            first += count
        return outs


def assert_compiled(drawn: list[Drawn]) -> None:
    """Assert that a compiled model of several networks does what they do."""
    model = Networks(drawn).eval()
    inputs = [x for case, _ in drawn for x in case.inputs()]
    fast = qfuse.compile(
        model,
        tuple(inputs),
        target=Target.for_testing(),
        options={"backend": "aoti", "cache": False},
    )
    program = capture(model, tuple(inputs))
    assert fast.runner.backend == "aoti", fast.report.notes
    assert fast.report.rolled_back == ()

    others = [torch.roll(x, 1, -1) if x.dim() else x for x in inputs]
    for given_inputs in (inputs, others):
        before = [x.clone() for x in given_inputs]
        first, second = fast(*given_inputs), fast(*given_inputs)
        assert all(map(same_values, first, second)), "a second call gives another answer"
        assert all(map(torch.equal, before, given_inputs)), "it wrote to its inputs"
        copies = [x.clone() for x in given_inputs]
        results = fast.runner.run(copies)
        verdict = ModelCheck.measure(program, given_inputs).judge(results)
        assert verdict.wrong is None, f"{verdict.wrong}\n{fast.plan}"


@pytest.mark.compiler
@pytest.mark.export
@pytest.mark.slow
@ONE
@given(drawn=st.lists(writing_modules(exact=True), min_size=NETWORKS, max_size=NETWORKS))
def test_compiled_convolutions_have_the_values_of_their_sources(drawn: list[Drawn]) -> None:
    assert_compiled(drawn)


@pytest.mark.thorough
@pytest.mark.compiler
@pytest.mark.export
@pytest.mark.slow
@ONE
@given(drawn=st.lists(sequence_modules(), min_size=NETWORKS, max_size=NETWORKS))
def test_compiled_sequences_have_the_values_of_their_sources(drawn: list[Drawn]) -> None:
    assert_compiled(drawn)
