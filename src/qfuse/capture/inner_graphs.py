"""The origin of nodes that come from a ``GraphModule`` inside the model.

torch.export runs the generated code of such a module, such as the result of PT2E, so all its nodes
would have the line that calls it. Its own nodes still know the user's lines and modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from qfuse.capture._export_api import generated_lines

_LAST_FRAME = re.compile(r'(?ms).*^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


@dataclass(frozen=True, slots=True)
class _Inner:
    """A graph inside a model.

    Attributes:
        path: Path of its module.
        lines: Its nodes by line of its generated code.
    """

    path: str
    lines: dict[int, Node]

    def origin_of(self, line: int) -> dict[str, Any]:
        """Return the metadata of the node of a line, with paths from the root of the model.

        A quantizer inserts nodes without an origin; they have no line rather than that of the call.
        """
        node = self.lines.get(line)
        if node is None:
            return {}
        stack = node.meta.get("nn_module_stack") or {}
        below = {key: (self._below(path), kind) for key, (path, kind) in stack.items()}
        return {"stack_trace": node.meta.get("stack_trace"), "nn_module_stack": below or None}

    def _below(self, path: str) -> str:
        return f"{self.path}.{path}" if path else self.path


def restore_origins(program: ExportedProgram, model: nn.Module) -> None:
    """Give nodes of graphs inside ``model`` the lines and modules that these graphs know.

    Nodes of a model that is itself a graph have them already. A graph that knows neither has the
    line of the call.
    """
    inner = {
        type(module).forward.__code__.co_filename: _Inner(path, generated_lines(module))
        for path, module in model.named_modules()
        if path and isinstance(module, GraphModule) and _knows_lines(module)
    }
    for node in program.graph.nodes if inner else ():
        frame = _LAST_FRAME.match(node.meta.get("stack_trace") or "")
        if frame is not None and frame["file"] in inner:
            node.meta.update(inner[frame["file"]].origin_of(int(frame["line"])))


def _knows_lines(module: GraphModule) -> bool:
    return any(node.meta.get("stack_trace") for node in module.graph.nodes)
