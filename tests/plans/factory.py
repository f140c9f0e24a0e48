"""Models for the command line."""

from __future__ import annotations

import torch
from tests.plans.test_plans import Siblings, example


def siblings() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Linears that are merged, with their example."""
    return Siblings().eval(), (example(),)
