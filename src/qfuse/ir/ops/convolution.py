"""Typed views of convolutions, for all ops that express them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.views import node_of, optional_node, shape_of

CONVOLUTIONS: tuple[OpOverload, ...] = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten.convolution.default,
)
"""The supported ops; transposed variants of others use a different weight layout."""

_OPERANDS = frozenset(("input", "weight", "bias"))


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of ``[batch, channels, *sizes]``, or of ``[channels, *sizes]``.

    Attributes:
        node: The call.
        x: The input.
        weight: ``[out channels, channels / groups, *kernel]``; ``[channels, ...]`` if transposed.
        bias: ``[out channels]``.
        settings: Every other argument as the op takes it, by name.
        axis: The axis of the channels in ``x`` and in the result.
    """

    node: Node
    x: Node
    weight: Node
    bias: Node | None
    settings: Mapping[str, Argument]
    axis: int

    @property
    def groups(self) -> Argument:
        """The number of channel groups."""
        return self.settings["groups"]

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution."""
        return self.settings.get("transposed", False) is not False

    @property
    def geometry(self) -> tuple[tuple[str, object], ...]:
        """The settings in canonical form, for comparing convolutions."""
        alone = {"groups", "transposed"}
        known: dict[str, object] = {
            name: value if name in alone or isinstance(value, str) else self.per_axis(name)
            for name, value in sorted(self.settings.items())
        }
        known["padding"] = self._padding()
        return tuple(known.items())

    def _padding(self) -> object:
        """Return the padding as numbers, or its name if the two sides of an axis differ."""
        named = self.settings["padding"]
        if named == "valid":
            return (0,) * (len(shape_of(self.weight)) - 2)
        if named != "same":
            return self.per_axis("padding")
        kernel = shape_of(self.weight)[2:]
        if not all(isinstance(size, int) for size in kernel):
            return named
        whole = [d * (int(k) - 1) for d, k in zip(self.per_axis("dilation"), kernel, strict=True)]
        # torch accepts it only with unit strides.
        return named if any(size % 2 for size in whole) else tuple(size // 2 for size in whole)

    def per_axis(self, name: str) -> tuple[int, ...]:
        """Return a setting per axis; a single number applies to all axes.

        Raises:
            TypeError: It is neither a number nor a list of numbers.
        """
        value = self.settings[name]
        numbers = value if isinstance(value, (list, tuple)) else [value]
        known = tuple(number for number in numbers if isinstance(number, int))
        if len(known) < len(numbers):
            raise TypeError(f"{name} of {self.node.format_node()} is not made of numbers")
        return known * (len(shape_of(self.weight)) - 2) if len(known) == 1 else known


def as_convolution(value: object) -> Convolution | None:
    """View ``value`` as a convolution, or ``None``."""
    if not isinstance(value, Node) or not is_call(value, *CONVOLUTIONS):
        return None
    a = arguments(value)
    x, weight = node_of(a["input"]), node_of(a["weight"])
    settings = {name: setting for name, setting in a.items() if name not in _OPERANDS}
    # In an unbatched input the channels are the first axis.
    axis = 1 if len(shape_of(x)) == len(shape_of(weight)) else 0
    return Convolution(value, x, weight, optional_node(a["bias"]), settings, axis)
