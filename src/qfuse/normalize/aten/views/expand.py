"""Expand composite movements into simpler ones, which parameters can follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import op_name
from qfuse.ir.ops.views import shape_of, tensor_of
from qfuse.ir.sizes import same_shape, same_size
from qfuse.normalize.aten.views.spellings import SPELLINGS, Spelling
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule


@dataclass(frozen=True, slots=True)
class SpelledMovement:
    """A movement, and its expansion."""

    node: Node
    spell: Spelling


class ExpandMovement(Rule[SpelledMovement]):
    """``pixel_shuffle``, ``tile``, ``concat`` and others become the movements they consist of.

    Before::

        x -> pixel_shuffle(2) -> ...

    After::

        x -> reshape -> permute -> clone -> view -> ...

    Every expansion returns new memory, as the movement does.

    Refuses: arguments without an expansion, such as a padding that is not a number; an expansion
    with other strides.
    """

    name = "expand-movement"
    anchors: ClassVar[tuple[OpOverload, ...]] = tuple(SPELLINGS)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> SpelledMovement | Miss:
        """Match a movement whose expansion has the same result, including its strides."""
        op = overload_of(node)
        assert op is not None, "the anchor is a call of an op"
        spell = SPELLINGS[op]
        # Trying it on fake tensors costs nothing and adds no nodes, so `match` stays pure.
        made = spell(_FakeSpeller(), node)
        if made is None:
            text = "the arguments of {} have no simpler spelling"
            return Miss(MissCode.ARGUMENT, node, text, op_name(node), progress=0)
        old = tensor_of(node)
        steps = zip(old.shape, old.stride(), made.stride(), strict=True)
        # Values and views of the result depend on its strides, except on those of axes of size 1.
        if not same_shape(old.shape, made.shape) or not all(
            same_size(size, 1) or same_size(a, b) for size, a, b in steps
        ):
            text = "the simpler spelling of {} has other strides"
            return Miss(MissCode.SHAPE, node, text, op_name(node))
        return SpelledMovement(node, spell)

    def rewrite(self, site: SpelledMovement, rw: Rewriter) -> None:
        """Call the simpler ops."""
        rw.replace(site.node, site.spell(_GraphSpeller(rw), site.node))


class _FakeSpeller:
    """Calls ops on the fake tensors of nodes."""

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Call an op."""
        known, named = map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            return op(*known, **named)

    def instead_of(self, node: Node, op: OpOverload, *args: Any) -> Any:
        """Return the replacement itself."""
        del op, args
        return tensor_of(node)

    def sizes(self, node: Node, count: int) -> list[Any]:
        """Return the sizes."""
        return list(shape_of(node)[:count])


@dataclass(frozen=True, slots=True)
class _GraphSpeller:
    """Adds calls to a graph."""

    rw: Rewriter

    def call(self, op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Add a call."""
        return self.rw.call(op, *args, **kwargs)

    def instead_of(self, node: Node, op: OpOverload, *args: Any) -> Any:
        """Add a call whose result has a known type."""
        return self.rw.replay(op, args, {}, tensor_of(node))

    def sizes(self, node: Node, count: int) -> list[Any]:
        """Return sizes; dynamic ones are nodes."""
        return self.rw.sizes(node, count)
