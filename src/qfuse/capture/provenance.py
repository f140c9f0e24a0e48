"""The origin of each node: the user's source line, and the module path."""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from qfuse.ir.graph.stage_graph import MODULE_META, SOURCE_META

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.*)$')


class UserFiles:
    """Distinguishes user files, including model libraries, from torch, torchao and qfuse."""

    def __init__(self) -> None:
        self._foreign = [Path(torch.__file__).parent, Path(__file__).parents[1]]
        torchao = importlib.util.find_spec("torchao")
        if torchao is not None:
            self._foreign += [Path(place) for place in torchao.submodule_search_locations or ()]
        self._standard = Path(sysconfig.get_path("stdlib"))
        self._known: dict[str, bool] = {}

    def owns(self, name: str) -> bool:
        """Return whether a file belongs to the user.

        Generated code, such as ``<eval_with_key>.0``, is not user code.
        """
        if name not in self._known:
            path = Path(name)
            self._known[name] = path.is_absolute() and not self._is_foreign(path)
        return self._known[name]

    def _is_foreign(self, path: Path) -> bool:
        # site-packages may be below the standard library, and packages may contain models.
        if path.is_relative_to(self._standard) and not is_installed(str(path)):
            return True
        return any(path.is_relative_to(root) for root in self._foreign)


def is_installed(name: str) -> bool:
    """Return whether a file is part of an installed package, such as a library of models."""
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(name).parts)


def annotate(module: GraphModule) -> None:
    """Reduce the metadata of torch.export on each node to two strings and the fake value.

    Nodes that a quantizer inserted have no origin. They get that of their first user, which they
    were inserted for, or else that of their operand.
    """
    files = UserFiles()
    nodes = list(module.graph.nodes)
    for node in nodes:
        source = source_line(node.meta.get("stack_trace"), files)
        path = _module_path(node.meta)
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
        if source is not None:
            node.meta[SOURCE_META] = source
        if path is not None:
            node.meta[MODULE_META] = path
    made = [n for n in nodes if n.op in {"call_function", "get_attr"}]
    # Backward, so that a chain of inserted nodes passes the origin on from its end.
    for node in reversed(made):
        _inherit(node, list(node.users))
    for node in made:
        _inherit(node, node.all_input_nodes)


def _inherit(node: Node, others: list[Node]) -> None:
    for key in (SOURCE_META, MODULE_META):
        found = next((other.meta[key] for other in others if key in other.meta), None)
        if found is not None and key not in node.meta:
            node.meta[key] = found


def source_line(trace: str | None, files: UserFiles) -> str | None:
    """Return ``file:line: code`` of the user's line in the innermost module, or ``None``.

    That is the innermost frame of the user's own files from the innermost ``forward`` on, or else
    of a library of models: a helper of a library is not where the user would change something,
    but a layer of a library that the user's model only calls is.
    """
    lines = (trace or "").splitlines()
    frames: list[tuple[str, str, str, str]] = []
    for index, line in enumerate(lines):
        frame = _FRAME.match(line)
        if frame is not None and files.owns(frame["file"]):
            code = lines[index + 1].strip() if index + 1 < len(lines) else ""
            frames.append((frame["file"], frame["line"], frame["function"], code))
    forward = max((i for i, frame in enumerate(frames) if frame[2] == "forward"), default=0)
    inner = frames[forward:]
    own = [frame for frame in inner if not is_installed(frame[0])]
    if not inner:
        return None
    file, number, _, code = (own or inner)[-1]
    return f"{file}:{number}: {code}"


def _module_path(meta: dict[str, Any]) -> str | None:
    """Return the dotted path of the innermost module, "" for the model, ``None`` if unknown."""
    stack = list((meta.get("nn_module_stack") or {}).values())
    if not stack:
        return None
    path, kind = stack[-1]
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    # Names of torch.export's wrappers, and of passes on the nodes that they insert.
    made = name.startswith("torch.export.") or name == path
    return None if made else str(path)
