"""What tests of the kernels' fakes share: the checks of torch, and arguments without values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def to_meta(args: Any) -> Any:
    """Return arguments whose tensors have no values."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
