"""Cache keys of programs: equal only if their packages behave identically."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from qfuse.backends.layout import size_hint
from qfuse.backends.prepare import Program
from qfuse.ir.errors import CacheError
from qfuse.ir.words import a_kind

BAKED_BYTES = 1024
"""Constants up to this size are keyed by value, since compilers inline small constants.

Inductor inlines constants without axes and those of one axis with up to 8 elements, and folds those
of one element. Other inlined constants are detected after compiling and recorded in the manifest.
"""

# Types whose `repr` is stable across processes and distinguishes all values.
_PLAIN = (
    *(type(None), bool, int, float, complex, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_SYMBOL = re.compile(r"\b[a-z]+\d+\b")


def program_digest(program: Program, facts: Mapping[str, str]) -> str:
    """Return the digest of a program and of everything that determines its compilation.

    Raises:
        CacheError: The program contains a value without a stable text.
    """
    digest = hashlib.sha256(program_text(program).encode())
    for name in sorted(facts):
        digest.update(f"\n{name}: {facts[name]}".encode())
    return digest.hexdigest()


def constant_digest(value: torch.Tensor) -> str:
    """Return the digest of a constant's bits."""
    flat = value.detach().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def package_digest() -> str:
    """Return the digest of qfuse's own sources."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in {".py", ".cpp", ".h"}:
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def program_text(program: Program) -> str:
    """Return a text with exactly the facts about ``program`` that its compiled form depends on.

    Intermediate dtypes and shapes follow from those of inputs and constants. Symbols are numbered
    in order of appearance.

    Raises:
        CacheError: The program contains a value without a stable text.
    """
    writer = _Writer()
    lines = writer.graph(program.module)
    lines += [
        f"{name} = {writer.type(value)}{_bits(value)}" for name, value in program.constants.items()
    ]
    # The declared ranges determine which assumptions of the compiler need a check.
    lines += [f"{size.name} in {size.low}..{size.high}" for size in program.sizes.values()]
    # Late values are ordinary outputs; the code does not depend on their targets.
    return "\n".join([*lines, *writer.symbols()])


def _bits(value: torch.Tensor) -> str:
    small = value.numel() * value.element_size() <= BAKED_BYTES
    return f" {constant_digest(value)}" if small else ""


class _Writer:
    """Writes values as text, with symbols renamed."""

    def __init__(self) -> None:
        self._symbols: dict[str, str] = {}
        self._env: ShapeEnv | None = None

    def graph(self, module: GraphModule) -> list[str]:
        """One line per node."""
        names: dict[Node, str] = {}
        lines: list[str] = []
        for node in module.graph.nodes:
            # By position: names of nodes differ between captures of one model.
            names[node] = f"%{len(names)}"
            line = f"{names[node]} = {node.op} {self._target(node)}"
            arguments = f"{self._value(node.args, names)} {self._value(node.kwargs, names)}"
            lines.append(f"{line} {arguments}")
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                lines.append(self.type(value))
            if node.op == "get_attr" and isinstance(
                inner := getattr(module, str(node.target)), GraphModule
            ):
                lines += ["{", *self.graph(inner), "}"]
        return lines

    def type(self, value: torch.Tensor) -> str:
        """Dtype, shape, strides and device."""
        shape = ", ".join(map(self._size, value.shape))
        strides = ", ".join(map(self._size, value.stride()))
        return f"{value.dtype}[{shape}]({strides}) {value.device}"

    def symbols(self) -> list[str]:
        """Return the ranges of the symbols in the text."""
        if self._env is None:
            return []
        # The hints are already in the text of every size.
        lines = [
            f"{self._symbols[str(symbol)]} in {bounds}"
            for symbol, bounds in self._env.var_to_range.items()
            if str(symbol) in self._symbols
        ]
        lines += [self._renamed(str(guard.expr)) for guard in self._env.guards]
        return sorted(lines)

    def _size(self, size: int | torch.SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        self._env = size.node.shape_env
        return f"{self._renamed(str(size.node.expr))}~{size_hint(size)}"

    def _renamed(self, expression: str) -> str:
        def name(match: re.Match[str]) -> str:
            return self._symbols.setdefault(match[0], f"z{len(self._symbols)}")

        return _SYMBOL.sub(name, expression)

    def _target(self, node: Node) -> str:
        if node.op != "call_function" or isinstance(node.target, OpOverload):
            return str(node.target)
        name = getattr(node.target, "__qualname__", None) or getattr(node.target, "__name__", None)
        if name is None:
            raise CacheError(f"{node.target!r} has no stable name")
        return f"{getattr(node.target, '__module__', '')}.{name}"

    def _value(self, value: object, names: Mapping[Node, str]) -> str:
        if isinstance(value, Node):
            return names[value]
        if isinstance(value, torch.SymInt):
            return self._size(value)
        if isinstance(value, _PLAIN):
            return repr(value)
        return self._container(value, names)

    def _container(self, value: object, names: Mapping[Node, str]) -> str:
        match value:
            case slice():
                return f"slice{self._value((value.start, value.stop, value.step), names)}"
            case tuple() | list():
                inner = ", ".join(self._value(v, names) for v in value)
                return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
            case dict():
                items = sorted((repr(k), self._value(v, names)) for k, v in value.items())
                return "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}"
            case _:
                raise CacheError(f"{a_kind(value)} has no stable text")
