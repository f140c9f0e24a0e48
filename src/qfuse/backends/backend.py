"""The interface of backends of other packages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar, Literal

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.backends.claimed import run_claimed
from qfuse.backends.runner import Runner
from qfuse.ir.events import Exactness
from qfuse.ir.graph.stage_graph import LoweredGraph
from qfuse.ir.refusal import Refusal
from qfuse.rewrite.scheduled import ScheduledRules


class Backend(ABC):
    """Claims ops of an optimized graph, and runs them.

    It sees the graph after optimize: fused ops such as ``qfuse::linear`` with quantized operands
    and results, quantize and dequantize where nothing could be fused, and plain ATen. What it does
    not claim is expanded to ATen, with the same bits, and runs in torch.

    Attributes:
        name: The name in options and in the report; the same as that of its entry point.
        supported_ops: The ops that it is asked about: those of ``qfuse.ir.ops.library``, ATen's,
            or any others.
        exactness: How far a claimed op may differ from its reference. ``EXACT`` and ``ROUNDING``
            are checked when a model is compiled; ``LOSSY``, as for fixed-point arithmetic, is not,
            and the report says so.
    """

    name: ClassVar[str]
    supported_ops: ClassVar[Collection[OpOverload]]
    exactness: ClassVar[Exactness] = Exactness.ROUNDING

    @abstractmethod
    def is_legal(self, node: Node) -> Literal[True] | Refusal:
        """Return ``True`` to claim ``node``, or why it cannot be claimed.

        It is asked once per node, in the order of the graph, before any other node is expanded. It
        must not edit the graph. The typed views of ``qfuse.ir.ops`` read a node's arguments.
        """

    @abstractmethod
    def implement(self, node: Node) -> Callable[..., Any]:
        """Return the function that computes a claimed node.

        It is called with the arguments of the node, tensors in place of nodes, and returns what the
        op returns: new tensors with the dtype, shape and strides of ``node.meta["val"]``. It must
        not write its arguments, and may be called by several threads. Constants can be read and
        packed here, once: ``constant_of`` gives their values.
        """

    def rules(self) -> Sequence[ScheduledRules]:
        """Return rules to run when a model is compiled for this backend."""
        return ()

    def compile(self, lowered: LoweredGraph) -> Runner:
        """Compile a graph whose claimed nodes are marked; the graph must not be changed.

        The default runs it op by op, claimed nodes with :meth:`implement`. A backend that compiles
        whole graphs overrides it. It is not called if several backends share a graph.

        Raises:
            BackendError: The graph cannot be compiled.
        """
        return run_claimed(lowered, [self])
