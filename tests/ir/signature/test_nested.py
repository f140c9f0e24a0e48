"""A nested tensor has no sizes that could be asked for, and is refused in words."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from qfuse.ir.errors import InputError
from qfuse.ir.graph.stage_graph import InputSpec, OutputSpec, Signature
from qfuse.ir.signature.caller import Caller


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor() -> None:
    spec = InputSpec("x", "x", torch.float32, (2, 8), torch.device("cpu"))
    leaf = pytree.tree_structure(0)
    caller = Caller(Signature(pytree.tree_structure(((0,), {})), (spec,), leaf, (OutputSpec(0),)))
    nested = torch.nested.nested_tensor([torch.zeros(8), torch.zeros(8)])
    with pytest.raises(InputError, match=r"got a nested tensor\n  do: pass .*x.to_padded_tensor"):
        caller.check(caller.bind((nested,), {}))
