"""Conditions that the kernels of several linears have."""

from __future__ import annotations

from qfuse.ir.refusal import Refusal
from qfuse.lower.operands.checks import channel_granularity, check_rows
from qfuse.lower.operands.groups import group_count
from qfuse.lower.operands.product_conditions import weight_params
from qfuse.lower.problems.conditions import Condition, refusal_in
from qfuse.lower.problems.linear import LinearProblem


def _check_channels(problem: LinearProblem) -> Refusal | None:
    return refusal_in(channel_granularity(problem))


def _check_groups(problem: LinearProblem) -> Refusal | None:
    return refusal_in(group_count(weight_params(problem).spec, problem.k))


SCALED_ROWS: Condition[LinearProblem] = Condition(
    "the activation has one scale, or one per row", check_rows
)

SCALED_CHANNELS: Condition[LinearProblem] = Condition(
    "the weight has one scale, or one per output feature", _check_channels
)

SCALED_GROUPS: Condition[LinearProblem] = Condition(
    "the weight has scales of groups of input features that kernels know", _check_groups
)
