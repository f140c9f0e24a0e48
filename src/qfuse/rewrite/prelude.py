"""The names that nearly every rule imports.

from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, Rewriter, Rule, aten
"""

from torch._ops import OpOverload
from torch.fx import Node

from qfuse.ir.aten import aten
from qfuse.ir.events import Exactness, MissCode
from qfuse.ir.graph.schema import arguments
from qfuse.rewrite.rewriter import Rewriter
from qfuse.rewrite.rule import Miss, Rule

__all__ = [
    "Exactness",
    "Miss",
    "MissCode",
    "Node",
    "OpOverload",
    "Rewriter",
    "Rule",
    "arguments",
    "aten",
]
