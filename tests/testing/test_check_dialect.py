"""What `check_dialect` finds in a dialect that is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.fx import Node

from qfuse.ir.errors import ExtensionError
from qfuse.ir.ops import library as ops
from qfuse.ir.ops.views import node_of, shape_of
from qfuse.ir.quant.spec import Arithmetic
from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.pt2e.dialect import DECOMPOSED
from qfuse.normalize.importers.qdq import QdqRule, QdqSite, make_spec
from qfuse.normalize.importers.qparams import fit
from qfuse.normalize.importers.rule import RefusedError, known_arguments
from qfuse.rewrite.prelude import MissCode
from qfuse.testing import Source, check_dialect, codes, scales


@torch.library.custom_op("qfuse_kit_tests::dequantize", mutates_args=())
def _dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return q.to(torch.float32) * scale.float().unsqueeze(-1)


@_dequantize.register_fake
def _fake(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    del scale
    return torch.empty_like(q, dtype=torch.float32)


OP = torch.ops.qfuse_kit_tests.dequantize.default


class Right(QdqRule):
    """Translates the op."""

    name = "kit-dequantize"
    anchors = (OP,)
    op = ops.dequantize
    scale_of_rows = True

    def read(self, node: Node) -> QdqSite:
        """Refuse other scales than float32."""
        a = known_arguments(node, ("q", "scale"))
        q, scale = node_of(a["q"]), node_of(a["scale"])
        if scale.meta["val"].dtype is not torch.float32:
            raise RefusedError(MissCode.DTYPE, scale, "the scale is not float32")
        lead = 1 if self.scale_of_rows else None
        spec = make_spec(
            node, (torch.int8, (-128, 127)), (lead, None), torch.float32, Arithmetic(torch.float32)
        )
        return QdqSite(node, q, fit(node, scale, spec.grid(shape_of(q))), None, spec)


class Off(Right):
    """Is wrong in the last bits."""

    name = "kit-off"

    def read(self, node: Node) -> QdqSite:
        """Round in bfloat16."""
        site = super().read(node)
        spec = replace(site.spec, arithmetic=Arithmetic(torch.bfloat16))
        return replace(site, spec=spec)


class Idle(Right):
    """Is never reached: the first rule takes all calls."""

    name = "kit-idle"


RIGHT = Dialect("kit", lambda: [Right()], frozenset({"qfuse_kit_tests"}))


def rows(source: Source) -> Node:
    q = source.b.const("q", codes((4, 8), torch.int8))
    return source.b.call(OP, q, source.b.const("scale", scales((4,))))


def wide(source: Source) -> Node:
    q = source.b.const("q", codes((4, 8), torch.int8))
    return source.b.call(OP, q, source.b.const("scale", scales((4,), torch.float64)))


def test_a_right_dialect_passes() -> None:
    coverage = check_dialect(RIGHT, rows, refuses=[wide])

    assert coverage.fired == {"kit-dequantize": 1}
    assert coverage.refused == (
        ("wide", "qfuse_kit_tests.dequantize.default", "kit-dequantize: the scale is not float32"),
    )
    assert str(coverage).splitlines()[0] == "kit-dequantize: fired 1"


def test_an_op_that_stays_is_found_with_the_reason() -> None:
    with pytest.raises(AssertionError, match="was not translated") as caught:
        check_dialect(RIGHT, rows, wide)
    assert "kit-dequantize: the scale is not float32" in str(caught.value)
    assert "give the example in `refuses`" in str(caught.value)


def test_other_bits_are_found() -> None:
    wrong = replace(RIGHT, rules=lambda: [Off()])
    with pytest.raises(AssertionError, match="normalizing changed bits") as caught:
        check_dialect(wrong, rows)
    assert "of 32 differ, first at" in str(caught.value)


def test_a_rule_that_never_fires_is_found() -> None:
    with pytest.raises(AssertionError, match="these rules fired in no example: kit-idle"):
        check_dialect(replace(RIGHT, rules=lambda: [Right(), Idle()]), rows)


def test_what_should_be_refused_and_is_not_is_found() -> None:
    with pytest.raises(AssertionError, match="every op was translated"):
        check_dialect(RIGHT, rows, refuses=[rows])


def test_a_refusal_without_a_reason_is_found() -> None:
    silent = replace(RIGHT, rules=list)
    with pytest.raises(AssertionError, match="stays without a reason"):
        check_dialect(silent, refuses=[wide])
    limits = {"qfuse_kit_tests::dequantize": "it has none"}
    coverage = check_dialect(replace(silent, limits=limits), refuses=[wide])
    assert coverage.refused[0][2] == "it has none"


class Broken(Right):
    """Fails."""

    name = "kit-broken"

    def match(self, node: Node) -> Any:
        return node.meta["no such key"]


class Forgets(Right):
    """Returns nothing."""

    name = "kit-forgets"

    def match(self, node: Node) -> Any:
        del node


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (Broken(), "the rule kit-broken failed here.*KeyError"),
        (Forgets(), "the rule kit-forgets failed here.*match returned None"),
    ],
)
def test_a_rule_that_fails_is_named(rule: Right, complaint: str) -> None:
    with pytest.raises(ExtensionError, match=complaint):
        check_dialect(replace(RIGHT, rules=lambda: [rule]), rows)


def test_a_dialect_without_rules_says_so() -> None:
    with pytest.raises(AssertionError, match="was not translated: the dialect has no rules"):
        check_dialect(replace(RIGHT, rules=list), rows)


def test_an_example_that_returns_nothing_is_named() -> None:
    def empty(source: Source) -> Any:
        rows(source)

    with pytest.raises(AssertionError, match="empty returned None"):
        check_dialect(RIGHT, empty)


def test_names_that_clash_are_found() -> None:
    with pytest.raises(ExtensionError, match="dialect decomposed"):
        check_dialect(replace(DECOMPOSED, namespaces=frozenset()), rows)
