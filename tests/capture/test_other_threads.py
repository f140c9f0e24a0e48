"""What other threads call while a model is traced is no part of the trace."""

from __future__ import annotations

import subprocess
import sys
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from qfuse.capture import capture
from qfuse.capture.this_thread import own_annotations

_METHOD = "_torchdynamo_disable_method"


def _run(call: Any) -> None:
    thread = Thread(target=call)
    thread.start()
    thread.join()


def test_a_call_of_another_thread_is_not_noted() -> None:
    noted: list[str | None] = []

    def look() -> None:
        noted.append(traceback.get_current_meta().get("custom", {}).get(_METHOD))

    # As code that torch.compile has compiled is.
    disabled = torch.compiler.disable(look)  # type: ignore[no-untyped-call]

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            _run(disabled)
            disabled()
            return x + 1

    capture(Model(), (torch.ones(2),))

    other, own = noted
    assert other != "look"
    assert own == "look"


def test_annotations_come_back() -> None:
    before = traceback.annotate
    with own_annotations():
        assert traceback.annotate is not before
        _run(lambda: traceback.annotate({"other": 1}).__enter__())
        with traceback.annotate({"own": 1}):
            assert traceback.get_current_meta()["custom"] == {"own": 1}

    assert traceback.annotate is before
    assert "custom" not in traceback.get_current_meta()


def test_dynamo_keeps_the_function_that_a_capture_replaces() -> None:
    # In a process that imports Dynamo while it captures.
    code = """
import torch
from torch.fx import traceback
from qfuse.capture import capture

capture(torch.nn.Linear(2, 2).eval(), (torch.ones(2, 2),))
from torch._dynamo.variables.torch import supported_ctx_manager_classes
print(traceback.annotate in supported_ctx_manager_classes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.stdout == "True\n", done.stderr
