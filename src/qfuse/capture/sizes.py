"""Symbolic sizes of the inputs: the symbol of each axis, and the relations between symbols.

torch.export has an expression over root symbols per axis, ranges of the roots, and guards that the
trace assumed. A signature has one symbol per axis instead, so that the shapes of a call bind all
symbols, and expresses everything else as relations.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

import torch
from torch.export import ExportedProgram

from qfuse.capture._export_api import DerivedSize, read_size
from qfuse.capture.example import Leaf
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.graph.stage_graph import SymbolRange
from qfuse.ir.signature.size_expr import parse_size


@dataclass(slots=True)
class SizeTable:
    """Collects the symbolic sizes, input by input.

    Attributes:
        program: The functional program.
        symbols: The range of each symbol that an axis binds.
        axes: The size of each axis, by the source of its tensor: an integer, or its symbol.
    """

    program: ExportedProgram
    symbols: dict[str, SymbolRange] = field(default_factory=dict)
    axes: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    _derived: dict[str, DerivedSize] = field(default_factory=dict)

    def add(self, leaf: Leaf, placeholder: str, value: torch.Tensor) -> tuple[int | str, ...]:
        """Name the sizes of one input and return its shape."""
        shape: list[int | str] = []
        for axis, size in enumerate(value.shape):
            known = read_size(size, self.program)
            if isinstance(known, int):
                shape.append(known)
                continue
            name = known.text
            # A derived size gets a symbol of its own, which the axis binds; its expression becomes
            # a relation.
            if known.roots != (known.text,):
                name = f"{placeholder}_{axis}"
                self._derived[name] = known
            if name not in self.symbols:
                label = str(getattr(leaf.dims.get(axis), "__name__", ""))
                # A data-dependent size has no value in the trace.
                hint = known.hint if known.hint is not None else known.low
                self.symbols[name] = SymbolRange(known.low, hint, known.high, label=label)
            shape.append(name)
        self.axes[leaf.source] = tuple(shape)
        return tuple(shape)

    def relations(self, guards: list[str]) -> tuple[str, ...]:
        """Return the relations between the symbols; all inputs must have been added.

        Raises:
            CaptureError: A guard of the trace cannot be checked on the shapes of the inputs.
        """
        found = [*self._relations_of_derived(), *(self._from_guard(g) for g in guards)]
        return tuple(dict.fromkeys(text for text in found if text is not None))

    def express(self, size: DerivedSize) -> str | None:
        """Return a size as an expression over bound symbols, ``None`` if it is data-dependent."""
        try:
            return self._substitute(size)
        except KeyError:
            return None

    def _relations_of_derived(self) -> list[str]:
        found = []
        for name, size in self._derived.items():
            # The axis that determines a root agrees with it by definition; only divisibility
            # remains to be checked.
            defining = [root for root in size.roots if self._defining(root) == name]
            if not defining:
                try:
                    found.append(f"{name} == {self._substitute(size)}")
                except KeyError as error:
                    raise _unsolved(name, size) from error
                continue
            factor, rest = size.linear or (1, 0)
            if factor > 1 and rest == 0:
                self._set_multiple(name, factor)
            elif factor > 1:
                found.append(f"({name} - {rest}) % {factor} == 0")
        return found

    def _set_multiple(self, name: str, factor: int) -> None:
        old = self.symbols[name]
        self.symbols[name] = SymbolRange(old.low, old.hint, old.high, factor, old.label)

    def _defining(self, root: str) -> str | None:
        """Return a derived axis that determines the value of a root that no axis binds."""
        if root in self.symbols:
            return None
        return next(
            (n for n, s in self._derived.items() if s.linear is not None and s.roots == (root,)),
            None,
        )

    def _substitute(self, size: DerivedSize) -> str:
        """Return the expression with unbound roots solved for. Raises KeyError if one is not."""
        hidden = {root: self._solve(root) for root in size.roots if root not in self.symbols}
        if not hidden:
            return size.text
        tree = ast.parse(size.text, mode="eval")
        return ast.unparse(_Replace(hidden).visit(tree))

    def _solve(self, root: str) -> ast.expr:
        name = self._defining(root)
        if name is None:
            raise KeyError(root)
        factor, rest = self._derived[name].linear or (1, 0)
        shifted = name if rest == 0 else f"({name} - {rest})"
        return ast.parse(shifted if factor == 1 else f"{shifted} // {factor}", mode="eval").body

    def _from_guard(self, guard: str) -> str | None:
        """Rewrite a guard of torch over our symbols; return ``None`` if it always holds."""
        tree = _Sizes(self.axes).visit(ast.parse(guard, mode="eval")).body
        text = ast.unparse(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        if not names <= self.symbols.keys() | {"math", "torch", "max", "min", "abs", "int"}:
            raise CaptureError(
                f"the trace relies on {guard}, which the shapes of the inputs do not determine",
                fix="export with contiguous example inputs, or leave the axis out of "
                "dynamic_shapes",
            )
        try:
            holds = parse_size(text)
        except InputError as error:
            raise CaptureError(f"the trace relies on {guard}, which is not understood") from error
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
            same = ast.unparse(tree.left) == ast.unparse(tree.comparators[0])
            if same and isinstance(tree.ops[0], ast.Eq):
                return None
        # A guard on numbers alone that holds needs no check in every call.
        return text if names & self.symbols.keys() or not holds({}) else None


class _Replace(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, values: dict[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._values.get(node.id, node)


class _Sizes(ast.NodeTransformer):
    """Replaces ``<source of a tensor>.size()[axis]`` by the size or symbol of that axis."""

    def __init__(self, axes: dict[str, tuple[int | str, ...]]) -> None:
        self._axes = {ast.unparse(ast.parse(source)): shape for source, shape in axes.items()}

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        match node:
            case ast.Subscript(
                value=ast.Call(func=ast.Attribute(value=source, attr="size")),
                slice=ast.Constant(value=int() as axis),
            ) if (shape := self._axes.get(ast.unparse(source))) is not None:
                size = shape[axis]
                return ast.Name(size) if isinstance(size, str) else ast.Constant(size)
        return node


def _unsolved(name: str, size: DerivedSize) -> CaptureError:
    return CaptureError(
        f"the size {name} is {size.text}, which inputs do not determine: {' or '.join(size.roots)}",
        fix="declare the sizes with torch.export.Dim, or leave the axis static",
    )
