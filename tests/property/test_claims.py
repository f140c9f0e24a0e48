"""Random networks, divided at random between a backend and torch, keep every bit."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.captured_case import CapturedCase
from tests.support.strategies.convolutions.cases import conv_cases
from tests.support.strategies.sequences.cases import sequence_cases
from torch.fx import Node

from qfuse.backends import Backend, run_claimed
from qfuse.ir.graph.text import to_text
from qfuse.ir.ops import library as ops
from qfuse.ir.refusal import Refusal
from qfuse.ir.signature.run import run_flat
from qfuse.lower import claim_ops
from qfuse.normalize import normalize
from qfuse.optimize import optimize, rules_for_claims
from qfuse.rewrite.clone import clone
from qfuse.testing.source import describe_difference, equal_but_for_nan

pytestmark = [pytest.mark.property, pytest.mark.numeric]

DEFAULT = settings()
SOME = settings(max_examples=max(40, DEFAULT.max_examples // 2))


class Some(Backend):
    """Claims some of qfuse's ops, and runs their references."""

    name = "some"
    supported_ops = (*ops.CANONICAL, *ops.FUSED)

    def __init__(self, salt: int) -> None:
        self.salt = salt

    def is_legal(self, node: Node) -> Any:
        """Answer by the name of the node, so that the same question has the same answer."""
        odd = zlib.crc32(f"{node.name} {self.salt}".encode()) % 2
        return True if odd else Refusal("its name is even")

    def implement(self, node: Node) -> Any:
        """Return the op."""
        return node.target


@SOME
@given(
    case=sequence_cases() | conv_cases(exact=False) | conv_cases(exact=True),
    salt=st.integers(0, 9),
)
def test_claimed_and_expanded_ops_have_the_bits_of_their_references(
    case: CapturedCase, salt: int
) -> None:
    backend = Some(salt)
    added = rules_for_claims(backend.supported_ops)
    optimized = optimize(normalize(clone(case.program)), added=added)
    lowered = claim_ops(clone(optimized), [backend])
    runner = run_claimed(lowered, [backend])
    for which in (0, 1):
        inputs = case.inputs(which)
        old = run_flat(optimized.module, inputs)
        for values in (run_flat(lowered.module, inputs), runner.run(inputs)):
            for before, after in zip(old, values, strict=True):
                text = to_text(lowered.graph)
                assert equal_but_for_nan(before, after), (
                    f"{describe_difference(before, after)}\n{text}"
                )
