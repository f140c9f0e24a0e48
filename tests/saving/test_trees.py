"""Containers survive; classes that are not imported become named tuples, and that is noted."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from qfuse.ir.errors import ModelFileError
from qfuse.saving.trees import TreeReader, tree_to_data


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    logits: Any
    hidden: Any = None
    cache: Any = None


@dataclass(frozen=True)
class _Shape:
    sides: int


torch.export.register_dataclass(Output, serialized_type_name="tests.saving.Output")


class Opaque:
    """A container with a context that cannot be saved."""

    def __init__(self, inner: Any, context: Any) -> None:
        self.inner, self.context = inner, context


pytree.register_pytree_node(
    Opaque,
    lambda value: ([value.inner], value.context),
    lambda children, context: Opaque(next(iter(children)), context),
    flatten_with_keys_fn=lambda value: (
        [(pytree.GetAttrKey("inner"), value.inner)],
        value.context,
    ),
)

TREES: dict[str, Any] = {
    "leaf": 1,
    "tuple": (1, (2,), ()),
    "list": [1, [2]],
    "dict": {"b": 1, "a": [2], 3: (4,), (5, "x"): 6},
    "ordered": OrderedDict(b=1, a=2),
    "default": defaultdict(list, a=1),
    "default without": defaultdict(None, a=1),
    "deque": deque([1, 2], maxlen=4),
    "named tuple": Pair(1, {"a": 2}),
    "dataclass": Output(1, cache=(2, 3)),
    "of torch": torch.return_types.topk((1, 2)),  # type: ignore[arg-type]
}


def saved(tree: Any) -> Any:
    return json.loads(json.dumps(tree_to_data(pytree.tree_structure(tree))))


@pytest.mark.parametrize("name", TREES)
def test_trees_survive(name: str) -> None:
    spec = pytree.tree_structure(TREES[name])
    reader = TreeReader()
    again = reader.read(saved(TREES[name]))

    assert again == spec
    assert reader.replaced == []
    count = spec.num_leaves
    rebuilt = pytree.tree_unflatten(list(range(count)), again)
    assert rebuilt == pytree.tree_unflatten(list(range(count)), spec)
    assert type(rebuilt) is type(TREES[name])
    # Inputs are compared with the structure.
    assert again.flatten_up_to(TREES[name]) == spec.flatten_up_to(TREES[name])


def test_a_class_that_is_not_imported_becomes_a_named_tuple(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("shop")

    @dataclass
    class Basket:
        apples: Any
        pears: Any = None
        nuts: Any = None

    Basket.__module__, Basket.__qualname__ = "shop", "Basket"
    plain = namedtuple("plain", ["x", "y"])  # noqa: PYI024 - the class is made at run time
    plain.__module__, plain.__qualname__ = "shop", "plain"
    vars(module).update(Basket=Basket, plain=plain)
    monkeypatch.setitem(sys.modules, "shop", module)
    torch.export.register_dataclass(Basket, serialized_type_name="tests.saving.Basket")
    data = saved((Basket(1, nuts=2), plain(3, [4])))
    monkeypatch.delitem(sys.modules, "shop")
    reader = TreeReader()
    basket, other = pytree.tree_unflatten([1, 2, 3, 4], reader.read(data))

    assert reader.replaced == ["shop:Basket", "shop:plain"]
    assert (basket.apples, basket.nuts, basket.pears) == (1, 2, None)
    assert basket[:2] == (1, 2)
    assert other == (3, [4])
    assert other.y == [4]
    assert type(basket).__name__ == "Basket"


def test_a_class_with_other_fields_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(Pair(1, 2))
    monkeypatch.setattr(sys.modules[__name__], "Pair", namedtuple("Pair", ["first", "third"]))  # noqa: PYI024
    reader = TreeReader()
    assert pytree.tree_unflatten([1, 2], reader.read(data)).second == 2
    assert reader.replaced == [f"{__name__}:Pair"]


def test_a_context_that_cannot_be_saved() -> None:
    reader = TreeReader()
    made = pytree.tree_unflatten([7], reader.read(saved(Opaque(1, _Shape(3)))))
    assert made.inner == 7
    assert reader.replaced == [f"{__name__}:Opaque"]
    assert isinstance(pytree.tree_unflatten([7], TreeReader().read(saved(Opaque(1, "x")))), Opaque)


def test_keys_that_cannot_be_saved_are_refused() -> None:
    with pytest.raises(ModelFileError, match="key of a dictionary"):
        tree_to_data(pytree.tree_structure({_Shape(3): 1}))


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "set", "children": []},
        {"kind": "defaultdict", "context": ["eval", ["a"]], "children": ["*"]},
    ],
    ids=lambda data: data["kind"],
)
def test_other_containers_are_not_made(data: Any) -> None:
    with pytest.raises(ValueError, match=r"a container|a defaultdict"):
        TreeReader().read(data)
