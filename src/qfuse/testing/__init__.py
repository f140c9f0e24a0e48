"""The kit for tests of dialects, rules, kernels and backends, in qfuse and in other packages.

Graphs are built by hand (:class:`GraphBuilder`, :class:`Source`, :class:`QuantizedLinear`), run
(:func:`run`, :func:`run_fixed_order`), and checked: a dialect by :func:`check_dialect` and
:func:`assert_same_bits`, a rule by :func:`check_rewrite`, :func:`golden`, :func:`refusal` and
:func:`assert_same_values`, a kernel by :func:`lowered_with` and :func:`check_lowered`, a backend by
:func:`check_backend`. A failed check is an ``AssertionError`` that says what differs, and where.
"""

from qfuse.testing.backend_check import BackendCoverage, check_backend
from qfuse.testing.build import GraphBuilder
from qfuse.testing.cases import BackendCase, battery
from qfuse.testing.dialect_check import DialectCoverage, check_dialect
from qfuse.testing.fixed_order import run_fixed_order
from qfuse.testing.lowering import check_lowered, lowered_with, refused_kernels, selected_kernel
from qfuse.testing.quant import QuantizedLinear, per_channel, per_tensor, per_token
from qfuse.testing.rewrite_check import Rewritten, check_rewrite
from qfuse.testing.rules import assert_same_values, golden, refusal
from qfuse.testing.run import random_inputs, run
from qfuse.testing.source import (
    Source,
    assert_same_bits,
    codes,
    fired,
    hard_numbers,
    only_miss,
    ops_of,
    scales,
)
from qfuse.testing.terms import Term, linear_result

__all__ = [
    "BackendCase",
    "BackendCoverage",
    "DialectCoverage",
    "GraphBuilder",
    "QuantizedLinear",
    "Rewritten",
    "Source",
    "Term",
    "assert_same_bits",
    "assert_same_values",
    "battery",
    "check_backend",
    "check_dialect",
    "check_lowered",
    "check_rewrite",
    "codes",
    "fired",
    "golden",
    "hard_numbers",
    "linear_result",
    "lowered_with",
    "only_miss",
    "ops_of",
    "per_channel",
    "per_tensor",
    "per_token",
    "random_inputs",
    "refusal",
    "refused_kernels",
    "run",
    "run_fixed_order",
    "scales",
    "selected_kernel",
]
