"""Inputs without values, and those that torch would refuse to write: refused before the run."""

from __future__ import annotations

import torch
from tests.ir.signature.test_caller import refusal, signature, tensor

from qfuse.ir.graph.stage_graph import Mutation
from qfuse.ir.signature.caller import Caller
from qfuse.passes._torch_api import new_mode


def test_what_torch_would_refuse_to_write_is_refused_before_the_run() -> None:
    specs = [tensor("x", 4)]
    writes = Caller(signature((0,), {}, specs, mutations=(Mutation(0, input_index=0),)))
    with torch.inference_mode():
        inference = torch.zeros(4)
        assert len(writes.check([inference])) == 1
    assert refusal(writes, inference).what.startswith("x was made in torch.inference_mode")
    error = refusal(writes, torch.zeros(1).expand(4))
    assert error.what.startswith("x has elements that share memory")
    assert error.fix == "pass x.clone()"
    assert len(Caller(signature((0,), {}, specs)).check([torch.zeros(1).expand(4)])) == 1


def test_a_fake_tensor_has_no_values() -> None:
    error = refusal(
        Caller(signature((0,), {}, [tensor("x", 4)])), new_mode().from_tensor(torch.ones(4))
    )
    assert error.what == "x: expected float32[4], got a FakeTensor, which has none"
