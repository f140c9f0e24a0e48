"""Patterns of expressions that explain_miss why they did not match."""

from qfuse.rewrite.pattern.captures import (
    ANY,
    Arg,
    Capture,
    Const,
    Known,
    Num,
    Operand,
    Read,
    Scalar,
    V,
)
from qfuse.rewrite.pattern.guards import bind, check, guard, let, single_use, where
from qfuse.rewrite.pattern.match import Match, PatternRule, explain_miss, match, pointed
from qfuse.rewrite.pattern.parts import Either, Literal, Maybe, Opt, Pattern, op
from qfuse.rewrite.pattern.through import CAST, Path, Step, Via, cast, through

__all__ = [
    "ANY",
    "CAST",
    "Arg",
    "Capture",
    "Const",
    "Either",
    "Known",
    "Literal",
    "Match",
    "Maybe",
    "Num",
    "Operand",
    "Opt",
    "Path",
    "Pattern",
    "PatternRule",
    "Read",
    "Scalar",
    "Step",
    "V",
    "Via",
    "bind",
    "cast",
    "check",
    "explain_miss",
    "guard",
    "let",
    "match",
    "op",
    "pointed",
    "single_use",
    "through",
    "where",
]
