"""Standalone passes on a plain ``torch.fx.GraphModule``, for custom pipelines.

>>> import torch
>>> from torch import nn
>>> class Two(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
...
...     def forward(self, x):
...         return self.a(x), self.b(x)
>>> module = torch.export.export(Two().eval(), (torch.ones(3, 4),)).module()
>>> outcome = MergeLinears()(module)
>>> outcome.modified, outcome.fired
(True, Counter({'merge-linears': 1}))
"""

from qfuse.passes.catalogue import (
    CancelQuantize,
    Equality,
    FuseConvolutions,
    FuseLinears,
    FuseMatmuls,
    FuseResults,
    GraphPass,
    LiftCombineQuantize,
    MergeLinears,
    SinkDequantize,
    Spelling,
)
from qfuse.passes.outcome import PassOutcome

__all__ = [
    "CancelQuantize",
    "Equality",
    "FuseConvolutions",
    "FuseLinears",
    "FuseMatmuls",
    "FuseResults",
    "GraphPass",
    "LiftCombineQuantize",
    "MergeLinears",
    "PassOutcome",
    "SinkDequantize",
    "Spelling",
]
