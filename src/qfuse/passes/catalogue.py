"""The passes, each with its options as fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from torch.fx import GraphModule

from qfuse.cost import CostModel
from qfuse.ir.errors import OptionsError
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, discover
from qfuse.optimize.commute.join import Join
from qfuse.optimize.commute.movement import MovementOp
from qfuse.optimize.commute.pad import Pad
from qfuse.optimize.commute.split import Split
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_linears import MergeLinears as MergeLinearsPass
from qfuse.optimize.propagate.cancel_quantize import CancelQuantize as CancelQuantizeRule
from qfuse.optimize.propagate.fuse_requantize import FuseRequantize
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize as SinkDequantizeRule
from qfuse.optimize.schedule import FUSION_RULES, RESULT_RULES, settle_rules
from qfuse.options import choice
from qfuse.passes.attempt import Work
from qfuse.passes.engine import run_pass
from qfuse.passes.examples import Examples
from qfuse.passes.outcome import PassOutcome
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Rule


class Equality(StrEnum):
    """When two parameters are equal.

    ``EXACT``: they are one tensor, or have the same bits. ``ASSUMED``: besides, two without values
    are, if they have one type and shape and play the same role for the same data.
    """

    EXACT = "exact"
    ASSUMED = "assumed"


class Spelling(StrEnum):
    """How what a pass made is written.

    ``SOURCE``: in the dialect of the ops that it was made of, if that can write; what cannot be
    said in it is not done. ``CANONICAL``: in the ops of ``qfuse`` and ATen.
    """

    SOURCE = "source"
    CANONICAL = "canonical"


@dataclass(frozen=True, slots=True)
class GraphPass(ABC):
    """A pass over a plain ``torch.fx.GraphModule`` of ATen and quantization ops.

    ``MergeLinears()(module)`` rewrites the module's graph in place. If anything is wrong, it raises
    and the module is untouched.

    Attributes:
        about: The rules that it is about; what it does without any of them firing is not kept.
        equality: ``"exact"``, or ``"assumed"`` for graphs of meta tensors; see :class:`Equality`.
        spelling: ``"source"`` or ``"canonical"``; see :class:`Spelling`.
        cost: Declines what is legal and does not pay; by default all that is legal is done.
        dialects: What the graph may speak; by default the built-in dialects and those of installed
            packages.
    """

    name: ClassVar[str]
    about: ClassVar[tuple[str, ...]]

    equality: str = "exact"
    spelling: str = "source"
    cost: CostModel | None = None
    dialects: Sequence[Dialect] | None = None

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            OptionsError: One has a value that it cannot take.
        """
        choice(Equality, self.equality, "equality")
        choice(Spelling, self.spelling, "spelling")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise OptionsError(f"cost must be a CostModel, not {type(self.cost).__name__}")
        for dialect in self.dialects or ():
            if not isinstance(dialect, Dialect):
                raise OptionsError(f"dialects holds a {type(dialect).__name__}, not a Dialect")

    def __call__(self, module: GraphModule, example_inputs: Examples | None = None) -> PassOutcome:
        """Rewrite the graph of ``module`` in place, wholly or not at all.

        Args:
            module: Its graph calls ATen and quantization ops, and writes to nothing but, at its
                end, inputs and buffers. Node objects are new afterwards; names stay.
            example_inputs: One for each placeholder, where these have no ``meta["val"]``: in their
                order, or by their names. Where they have it, examples are checked against it.

        Raises:
            GraphError: The graph cannot be read; the message names the node and what to do.
            NormalizeError: A quantized op of it is malformed.
        """
        dialects = (*BUILTIN, *discover()) if self.dialects is None else tuple(self.dialects)
        work = Work(
            self.run,
            self.about,
            dialects,
            back=self.spelling == Spelling.SOURCE,
            cost=self.cost,
            assume_equal=self.equality == Equality.ASSUMED,
        )
        return run_pass(self.name, work, module, example_inputs)

    @abstractmethod
    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Rewrite a graph in the canonical spelling."""


class _MovingPass(GraphPass, ABC):
    """Applies rules that move quantization, and combines what has become equal."""

    rules: ClassVar[tuple[type[Rule[Any]], ...]]

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Apply the rules until nothing changes."""
        Combine().run(program, context)
        return settle_rules(program, self.rules, context)


class _LiftAboveMovements(LiftQuantize):
    """Crosses what moves numbers, not what computes with them."""

    families = (MovementOp, Join, Pad)


class _SinkBelowMovements(SinkDequantizeRule):
    """Crosses what moves numbers, not what computes with them."""

    families = (Split, Join, Pad, MovementOp)


class LiftCombineQuantize(_MovingPass):
    """Quantize first, move later: quantizes rise above views, and equal ones become one.

    What computes, such as a norm, and its quantize become neighbours. Copies, joins and paddings
    are crossed too. Static quantizes rise with
    their parameters, dynamic ones where their blocks stay together.
    """

    name = "lift-combine-quantize"
    rules = (LiftChoose, _LiftAboveMovements)
    about = (*(rule.name for rule in rules), Combine.name)


class SinkDequantize(_MovingPass):
    """Move first, dequantize later: dequantizes sink below views, splits, joins and paddings."""

    name = "sink-dequantize"
    rules = (_SinkBelowMovements,)
    about = tuple(rule.name for rule in rules)


class CancelQuantize(_MovingPass):
    """A quantize of a dequantize goes away, or becomes one requantize."""

    name = "cancel-quantize"
    rules = (CancelQuantizeRule, FuseRequantize)
    about = tuple(rule.name for rule in rules)


class MergeLinears(GraphPass):
    """Linears of any kind that read one input become one wide linear and a split."""

    name = "merge-linears"
    about = (MergeLinearsPass.name,)

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Combine what the siblings read, then merge them."""
        Combine().run(program, context)
        return MergeLinearsPass().run(program, context)


class FuseLinears(GraphPass):
    """Linears take in the quantization at their edges, bias, activation, additions and casts."""

    name = "fuse-linears"
    about = tuple(rule.name for rule in FUSION_RULES)

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Grow every linear outward."""
        Combine().run(program, context)
        return apply_rules(program, [rule() for rule in FUSION_RULES], context)


class FuseResults(GraphPass):
    """What computes, such as a norm, takes in the quantize of its result."""

    name = "fuse-results"
    about = tuple(rule.name for rule in RESULT_RULES)

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Grow every result."""
        Combine().run(program, context)
        return apply_rules(program, [rule() for rule in RESULT_RULES], context)
