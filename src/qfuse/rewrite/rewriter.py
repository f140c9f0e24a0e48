"""The only classes that edit a graph. They maintain meta and provenance, and support undo."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_arg

from qfuse.ir.errors import RewriteError
from qfuse.ir.graph.stage_graph import MODULE_META, RULE_META, SOURCE_META, place_of
from qfuse.ir.graph.text import type_text
from qfuse.ir.sizes import same_shape
from qfuse.rewrite import _fake_api

ORIGIN_META = "qfuse_origin"
"""Meta key: names of the captured nodes that a node implements."""


@dataclass(slots=True)
class Journal:
    """The edits of one rewrite in order, so that it can be inspected, undone or committed."""

    made: list[Node] = field(default_factory=list)
    replaced: list[tuple[Node, Node]] = field(default_factory=list)
    users: list[tuple[Node, tuple[Argument, ...], dict[str, Argument]]] = field(
        default_factory=list
    )


class GraphEditor:
    """Edits one module's graph; creates one :class:`Rewriter` per rewrite."""

    def __init__(self, module: GraphModule) -> None:
        self.module = module
        self._fake_mode: Any = _fake_mode_of(module)
        self._valueless_on = _device_of_valueless(module)
        self._names = {id(t): name for name, t in module.named_buffers(remove_duplicate=False)}
        self._kept: list[torch.Tensor] = []
        self._counts: dict[str, int] = {}

    def rewriter(self, rule: str, anchor: Node) -> Rewriter:
        """Start a rewrite of ``rule`` at ``anchor``."""
        return Rewriter(self, rule, anchor)

    def add_constant(self, tensor: torch.Tensor, hint: str) -> str:
        """Register ``tensor`` as a buffer, once, and return its name."""
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        base = "".join(c if c.isalnum() else "_" for c in hint)
        # Many constants share a hint: continue counting, since a restart would be quadratic.
        count = self._counts.get(base, 0)
        name = f"{base}_{count}" if count else base
        while hasattr(self.module, name):
            count += 1
            name = f"{base}_{count}"
        self._counts[base] = count
        self.module.register_buffer(name, tensor.detach())
        # The module holds the detached alias; keep the caller's object alive so ids stay unique.
        self._names[id(tensor)] = name
        self._names[id(self.module.get_buffer(name))] = name
        self._kept.append(tensor)
        return name

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Drop the constants that are added meanwhile; what uses them has to be undone in it."""
        known = self._names, self._kept, self._counts
        before = {name for name, _ in self.module.named_buffers(remove_duplicate=False)}
        self._names, self._kept, self._counts = dict(known[0]), list(known[1]), dict(known[2])
        try:
            yield
        finally:
            for name, _ in list(self.module.named_buffers(remove_duplicate=False)):
                if name not in before:
                    delattr(self.module, name)
            self._names, self._kept, self._counts = known

    def drop_unused(self, keep: Collection[str]) -> None:
        """Delete the constants that no node reads and ``keep`` does not name."""
        used = {str(n.target) for n in self.module.graph.find_nodes(op="get_attr")} | set(keep)
        names = dict(self.module.named_buffers(remove_duplicate=False)).keys() - used
        for name in names:
            owner, _, leaf = name.rpartition(".")
            delattr(self.module.get_submodule(owner), leaf)
        # Without their memory, their ids may become those of other tensors.
        self._kept = [t for t in self._kept if self._names[id(t)] not in names]
        self._names = {key: name for key, name in self._names.items() if name not in names}

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fake tensor of a constant."""
        if self._fake_mode is None:
            return tensor
        # A single pass on a graph of meta tensors works on a CPU copy, whose constants stay on
        # meta.
        if tensor.is_meta and self._valueless_on is not None:
            shape, strides, on = tensor.shape, tensor.stride(), self._valueless_on
            with self._fake_mode:
                return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=on)
        # A constant never varies in size; otherwise torch may make its sizes symbols.
        fake: torch.Tensor = self._fake_mode.from_tensor(tensor, static_shapes=True)
        return fake

    def infer(self, op: Any, args: tuple[Argument, ...], kwargs: dict[str, Argument]) -> Any:
        """Return the fake result of calling ``op`` on the fake values of its arguments.

        Raises:
            RuntimeError: The op would fix a size that may vary.
        """

        def value(arg: Any) -> Any:
            return map_arg(arg, lambda n: n.meta["val"])

        if self._fake_mode is None:
            return op(*value(args), **value(kwargs))
        return _fake_api.infer(op, value(args), value(kwargs), self._fake_mode)

    def erase_dead(self, roots: Iterable[Node]) -> tuple[list[Node], list[Node]]:
        """Erase those of ``roots`` without users, and the operands that only they used.

        Returns:
            The erased nodes, and the surviving nodes that lost a user.
        """
        erased: dict[Node, None] = {}
        touched: dict[Node, None] = {}
        stack = list(roots)
        while stack:
            node = stack.pop()
            # Placeholders are the calling convention, used or not.
            if node.users or node.op in {"placeholder", "output"} or node in erased:
                continue
            inputs = list(node.all_input_nodes)
            self.module.graph.erase_node(node)
            erased[node] = None
            for source in inputs:
                touched[source] = None
                stack.append(source)
        return list(erased), [n for n in touched if n not in erased]

    def sweep(self) -> None:
        """Erase every node without users."""
        dead = [n for n in self.module.graph.nodes if not n.users and not n.is_impure()]
        self.erase_dead(reversed(dead))


class Rewriter:
    """Edits the graph on behalf of one rule at one anchor.

    New nodes are inserted right before the anchor, in creation order, except inside
    :meth:`before`.
    """

    def __init__(self, editor: GraphEditor, rule: str, anchor: Node) -> None:
        self._editor = editor
        self._rule = rule
        self._anchor = anchor
        self._here = anchor
        # The nodes that new nodes stand for, if that is not the whole rewrite.
        self._instead: dict[Node, Node] = {}
        self.journal = Journal()

    @contextmanager
    def before(self, node: Node) -> Iterator[None]:
        """Insert new nodes right before ``node``, so that they may use nodes after the anchor."""
        here, self._here = self._here, node
        try:
            yield
        finally:
            self._here = here

    @contextmanager
    def instead_of(self, node: Node) -> Iterator[None]:
        """Insert new nodes right before ``node``, and give them its provenance alone."""
        anchor, first = self._anchor, len(self.journal.made)
        self._anchor = node
        try:
            with self.before(node):
                yield
        finally:
            self._anchor = anchor
            self._instead.update(dict.fromkeys(self.journal.made[first:], node))

    def call(self, op: OpOverload, *args: Argument, **kwargs: Argument) -> Node:
        """Add a call of ``op`` and infer its value.

        Raises:
            RewriteError: The op rejects the arguments.
        """
        graph = self._editor.module.graph
        with graph.inserting_before(self._here):
            node = graph.call_function(op, args, kwargs)
        self._note(node)
        try:
            node.meta["val"] = self._editor.infer(op, args, kwargs)
        except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as error:
            text = node.format_node()
            self.undo()
            raise RewriteError(
                f"rule {self._rule} made a call that its op rejects: {text}: {error}",
                where=str(place_of(self._anchor)),
            ) from error
        return node

    def replay(
        self, target: Any, args: tuple[Argument, ...], kwargs: dict[str, Argument], value: object
    ) -> Node:
        """Add a call whose value is already known, such as one of a traced template."""
        graph = self._editor.module.graph
        with graph.inserting_before(self._here):
            node = graph.call_function(target, args, kwargs)
        self._note(node)
        node.meta["val"] = value
        return node

    def item(self, node: Node, index: int) -> Node:
        """Add ``node[index]`` for an op with several results."""
        graph = self._editor.module.graph
        with graph.inserting_before(self._here):
            new = graph.call_function(operator.getitem, (node, index))
        self._note(new)
        new.meta["val"] = node.meta["val"][index]
        return new

    def sizes(self, node: Node, count: int) -> list[Argument]:
        """Return the first ``count`` sizes of ``node``: numbers, or nodes if they are dynamic."""
        shape = node.meta["val"].shape[:count]
        ask = torch.ops.aten.sym_size.int
        return [s if isinstance(s, int) else self.call(ask, node, i) for i, s in enumerate(shape)]

    def constant(self, tensor: torch.Tensor, hint: str) -> Node:
        """Add a constant, named after ``hint``; the same tensor is stored once."""
        name = self._editor.add_constant(tensor, hint)
        graph = self._editor.module.graph
        with graph.inserting_before(self._here):
            node = graph.get_attr(name)
        self._note(node)
        node.meta["val"] = self._editor.fake(self._editor.module.get_buffer(name))
        return node

    def replace(self, old: Node, new: Node, *, but: Collection[Node] = ()) -> None:
        """Replace ``old`` by ``new`` in its users; commit erases ``old`` if it has no users left.

        Args:
            old: The node to replace.
            new: The replacement.
            but: Users that keep ``old``, such as those that will be erased.

        Raises:
            RewriteError: The two values differ in shape or dtype.
        """
        if not _same_type(old.meta["val"], new.meta["val"]):
            before, after = type_text(old.meta["val"]), type_text(new.meta["val"])
            self.undo()
            raise RewriteError(
                f"rule {self._rule} would change a value's type from {before} to {after}",
                where=str(place_of(old)),
            )

        def moves(user: Node) -> bool:
            # The new node may use the old one, as a cast of it does.
            return user is not new and user not in but

        for user in filter(moves, list(old.users)):
            self.journal.users.append((user, user.args, dict(user.kwargs)))
        old.replace_all_uses_with(new, delete_user_cb=moves)
        self.journal.replaced.append((old, new))

    def undo(self) -> None:
        """Restore the graph to its state before the rewrite."""
        # A user may be recorded twice; the oldest arguments have to be restored last.
        for user, args, kwargs in reversed(self.journal.users):
            user.args = args
            user.kwargs = kwargs
        # Later nodes use earlier ones, and a node with users cannot be erased.
        for node in reversed(self.journal.made):
            self._editor.module.graph.erase_node(node)
        # New constants stay registered; lowering drops those that no node uses.
        self.journal = Journal()

    def commit(self) -> tuple[list[Node], list[Node]]:
        """Erase dead nodes and pass their provenance on.

        Returns:
            The erased nodes, and the nodes whose neighbours changed.
        """
        roots = [old for old, _ in self.journal.replaced] + [
            n for n in self.journal.made if not n.users
        ]
        # A new node stands for the anchor and for all that died with it.
        origin: dict[str, None] = dict.fromkeys(origins(self._anchor))
        new = set(self.journal.made)
        erased, touched = self._editor.erase_dead(roots)
        for node in erased:
            # One that this rewrite made and did not need implements nothing of its own.
            if node not in new:
                origin.update(dict.fromkeys(origins(node)))
        gone = set(erased)
        made = [n for n in self.journal.made if n not in gone]
        # Dictionaries instead of sets: the driver visits them in this order, which has to be the
        # same in every run.
        around: dict[Node, None] = dict.fromkeys(touched)
        for node in made:
            source = self._instead.get(node)
            node.meta[ORIGIN_META] = tuple(origin) if source is None else origins(source)
            self._keep_place(node, [n for n in erased if n not in new])
            around[node] = None
            around.update(dict.fromkeys(node.users))
            around.update(dict.fromkeys(node.all_input_nodes))
        around.update(dict.fromkeys(new for _, new in self.journal.replaced))
        # An extra user does not enable rewrites of the other users, and there may be very many.
        around.update(dict.fromkeys(user for user, _, _ in self.journal.users))
        return erased, [n for n in around if n not in gone]

    def _keep_place(self, node: Node, erased: Sequence[Node]) -> None:
        """Give a call of the op of an erased node the place of that node.

        It is that call with other arguments: a linear that took over a relu is still the user's
        linear, although the rule was tried at the relu.
        """
        if node in self._instead or node.target == self._anchor.target:
            return
        same = next((old for old in erased if old.target == node.target), None)
        if same is not None:
            _copy_place(same, node)

    def _note(self, node: Node) -> None:
        self.journal.made.append(node)
        _copy_place(self._anchor, node)
        node.meta[RULE_META] = self._rule


def _copy_place(source: Node, node: Node) -> None:
    for key in (SOURCE_META, MODULE_META):
        if key in source.meta:
            node.meta[key] = source.meta[key]


def origins(node: Node) -> tuple[str, ...]:
    """Return the names of the captured nodes that ``node`` implements."""
    names: tuple[str, ...] = node.meta.get(ORIGIN_META, (node.name,))
    return names


def _same_type(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and _same_shape(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same_type(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b)


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same_shape(a.shape, b.shape)


def _fake_mode_of(module: GraphModule) -> Any:
    """Return the fake mode of the graph's values, ``None`` if they are real."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            return mode
    return None


def _device_of_valueless(module: GraphModule) -> torch.device | None:
    """Return the device that constants without values represent, if they are not on it."""
    for node in module.graph.find_nodes(op="get_attr"):
        fake = node.meta.get("val")
        held = getattr(module, str(node.target), None)
        if isinstance(held, torch.Tensor) and held.is_meta and isinstance(fake, torch.Tensor):
            return fake.device
    return None
