"""The standalone passes, with their options as fields."""

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
from qfuse.ir.words import a_kind
from qfuse.normalize.builtin import BUILTIN
from qfuse.normalize.importers.dialect import Dialect, discover
from qfuse.optimize.commute.join import CommutingJoin
from qfuse.optimize.commute.movement import MovementOp
from qfuse.optimize.commute.pad import Pad
from qfuse.optimize.commute.split import Split
from qfuse.optimize.fuse.convolution import FuseConvolution
from qfuse.optimize.fuse.linear import FuseLinear
from qfuse.optimize.fuse.matmul import FuseMatmul
from qfuse.optimize.merge.cse import Combine
from qfuse.optimize.merge.merge_linears import MergeLinears as MergeLinearsPass
from qfuse.optimize.propagate.cancel_quantize import CancelQuantize as CancelQuantizeRule
from qfuse.optimize.propagate.fuse_requantize import FuseRequantize
from qfuse.optimize.propagate.lift_choose import LiftChoose
from qfuse.optimize.propagate.lift_quantize import LiftQuantize
from qfuse.optimize.propagate.sink_dequantize import SinkDequantize as SinkDequantizeRule
from qfuse.optimize.schedule import EPILOGUE_RULES, RESULT_RULES, settle_rules
from qfuse.options import choice
from qfuse.passes.attempt import RewriteTask
from qfuse.passes.engine import run_pass
from qfuse.passes.examples import Examples
from qfuse.passes.outcome import PassOutcome
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.driver import apply_rules
from qfuse.rewrite.rule import Rule


class Equality(StrEnum):
    """When two parameters count as equal.

    ``EXACT``: they are the same tensor, or have the same bits. ``ASSUMED``: also two parameters
    without values, of the same dtype and shape, with the same role for the same data.
    """

    EXACT = "exact"
    ASSUMED = "assumed"


class Spelling(StrEnum):
    """The ops that a pass writes its results in.

    ``SOURCE``: the dialect of the ops that were rewritten, if it can export; a result that it
    cannot express is not done. ``CANONICAL``: the ops of ``qfuse`` and ATen.
    """

    SOURCE = "source"
    CANONICAL = "canonical"


@dataclass(frozen=True, slots=True)
class GraphPass(ABC):
    """A pass over a plain ``torch.fx.GraphModule`` of ATen and quantization ops.

    ``MergeLinears()(module)`` rewrites the module's graph in place. On error it raises and leaves
    the module unchanged.

    Attributes:
        about: The rules of the pass; if none of them fires, its changes are discarded.
        equality: ``"exact"``, or ``"assumed"`` for graphs of meta tensors; see :class:`Equality`.
        spelling: ``"source"`` or ``"canonical"``; see :class:`Spelling`.
        cost: Declines legal rewrites that do not pay; by default all legal rewrites are done.
        dialects: The dialects that the graph may use; by default the built-in ones and those of
            installed packages.
    """

    name: ClassVar[str]
    about: ClassVar[tuple[str, ...]]

    equality: str = "exact"
    spelling: str = "source"
    cost: CostModel | None = None
    dialects: Sequence[Dialect] | None = None

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            OptionsError: An option has an invalid value.
        """
        choice(Equality, self.equality, "equality")
        choice(Spelling, self.spelling, "spelling")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise OptionsError(f"cost must be a CostModel, not {type(self.cost).__name__}")
        for dialect in self.dialects or ():
            if not isinstance(dialect, Dialect):
                raise OptionsError(f"dialects holds {a_kind(dialect)}, not a Dialect")

    def __call__(self, module: GraphModule, example_inputs: Examples | None = None) -> PassOutcome:
        """Rewrite the graph of ``module`` in place, atomically.

        Args:
            module: A graph of ATen and quantization ops that is functional, except for writes to
                inputs and buffers at its end. Nodes are new objects afterwards; names stay.
            example_inputs: One per placeholder, in order or by name; needed for placeholders
                without ``meta["val"]``, and checked against it for others.

        Raises:
            GraphError: The graph is not supported; the message names the node and a fix.
            NormalizeError: A quantization op is malformed.
        """
        dialects = (*BUILTIN, *discover()) if self.dialects is None else tuple(self.dialects)
        work = RewriteTask(
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
        """Rewrite a graph of canonical ops."""


class _MovingPass(GraphPass, ABC):
    """Applies rules that move quantization ops, and combines the nodes that become equal."""

    rules: ClassVar[tuple[type[Rule[Any]], ...]]

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Apply the rules until nothing changes."""
        # Rules compare computed operands by node, so equal ones become one node first.
        Combine().run(program, context)
        return settle_rules(program, self.rules, context)


class _LiftAboveMovements(LiftQuantize):
    """Crosses movement ops, but not computations."""

    families = (MovementOp, CommutingJoin, Pad)


class _SinkBelowMovements(SinkDequantizeRule):
    """Crosses movement ops, but not computations."""

    families = (Split, CommutingJoin, Pad, MovementOp)


class LiftCombineQuantize(_MovingPass):
    """Lift quantize ops above movement ops, and combine equal ones.

    A computation, such as a norm, and the quantize of its result become adjacent. Copies,
    concatenations and paddings are crossed too. Static quantize ops are lifted with their
    parameters, dynamic ones if the elements of each block stay together.
    """

    name = "lift-combine-quantize"
    rules = (LiftChoose, _LiftAboveMovements)
    about = (*(rule.name for rule in rules), Combine.name)


class SinkDequantize(_MovingPass):
    """Sink dequantize ops below views, splits, concatenations and paddings."""

    name = "sink-dequantize"
    rules = (_SinkBelowMovements,)
    about = tuple(rule.name for rule in rules)


class CancelQuantize(_MovingPass):
    """Cancel a dequantize-quantize pair, or fuse it to a requantize."""

    name = "cancel-quantize"
    rules = (CancelQuantizeRule, FuseRequantize)
    about = tuple(rule.name for rule in rules)


class MergeLinears(GraphPass):
    """Merge linears with the same input, of any kind, into one wide linear and a split."""

    name = "merge-linears"
    about = (MergeLinearsPass.name,)

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Combine equal operands of the siblings, then merge the siblings."""
        Combine().run(program, context)
        return MergeLinearsPass().run(program, context)


class _FusingPass(GraphPass, ABC):
    """Applies rules until nothing changes."""

    rules: ClassVar[tuple[type[Rule[Any]], ...]]

    def run(self, program: StageGraph, context: RewriteContext) -> object:
        """Combine equal operands, then apply the rules."""
        Combine().run(program, context)
        return apply_rules(program, [rule() for rule in self.rules], context)


class FuseLinears(_FusingPass):
    """Fuse linears with the Q/DQ ops of their operands and results, and with their epilogue."""

    name = "fuse-linears"
    rules = (FuseLinear, *EPILOGUE_RULES)
    about = tuple(rule.name for rule in rules)


class FuseConvolutions(_FusingPass):
    """Fuse convolutions with the Q/DQ ops of their operands and results, and their epilogue."""

    name = "fuse-convolutions"
    rules = (FuseConvolution, *EPILOGUE_RULES)
    about = tuple(rule.name for rule in rules)


class FuseMatmuls(_FusingPass):
    """Fuse products of two activations with the Q/DQ ops of their operands and results."""

    name = "fuse-matmuls"
    rules = (FuseMatmul, *EPILOGUE_RULES)
    about = tuple(rule.name for rule in rules)


class FuseResults(_FusingPass):
    """Fuse computations, such as a norm, with the quantize of their result."""

    name = "fuse-results"
    rules = RESULT_RULES
    about = tuple(rule.name for rule in rules)
