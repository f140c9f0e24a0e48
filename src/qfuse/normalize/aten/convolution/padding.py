"""Convolutions with a padding in words get one in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from qfuse.ir.ops.convolution import Convolution, as_convolution
from qfuse.ir.ops.views import tensor_of
from qfuse.ir.sizes import element_count, is_row_major
from qfuse.rewrite.prelude import Exactness, Miss, MissCode, Node, OpOverload, Rewriter, Rule, aten

_PLAIN: dict[OpOverload, OpOverload] = {
    aten.conv1d.padding: aten.conv1d.default,
    aten.conv2d.padding: aten.conv2d.default,
    aten.conv3d.padding: aten.conv3d.default,
}


@dataclass(frozen=True, slots=True)
class PaddingSite:
    """A convolution and its padding in numbers.

    Attributes:
        conv: The convolution.
        both: The padding of both sides of every axis.
        after: What is padded besides after every axis.
    """

    conv: Convolution
    both: tuple[int, ...]
    after: tuple[int, ...]


class SpellPadding(Rule[PaddingSite]):
    """``conv(x, padding="same")`` becomes a convolution with a padding in numbers.

    Before::

        x -> conv2d(padding="same")

    After::

        x -> constant_pad_nd(0) -> conv2d(padding=[0, 1])

    ``"same"`` pads one element more after an axis than before it if the kernel is even. These
    elements are padded first, as torch does it; otherwise there is no copy.

    Refuses: a kernel of unknown size; settings that are computed at run time; sides that differ for
    an input that is not row-major, if it has dynamic sizes or no batch.
    """

    name = "spell-padding"
    anchors: ClassVar[tuple[OpOverload, ...]] = tuple(_PLAIN)
    exactness = Exactness.EXACT

    def match(self, node: Node) -> PaddingSite | Miss:
        """Match any padding in words."""
        conv = as_convolution(node)
        assert conv is not None, "the anchor is a convolution"
        if not conv.is_static:
            return Miss(MissCode.ARGUMENT, node, "its settings are computed at run time")
        if not isinstance(conv.padding, str):
            # The view names a padding only if the two sides differ or the kernel is unknown.
            return PaddingSite(conv, conv.padding, (0,) * conv.spatial)
        whole = conv.same_padding
        if whole is None:
            return Miss(MissCode.SHAPE, conv.weight, "the size of its kernel is not known")
        x = tensor_of(conv.x)
        # `_padded` types its result as row-major if a size is symbolic; and torch adds a batch axis
        # before it pads, which changes the order that it sees.
        if not is_row_major(x) and (conv.axis == 0 or element_count(x.shape) is None):
            text = "its input is not row-major, so the strides of a padded copy are not known"
            return Miss(MissCode.SHAPE, conv.x, text)
        # As torch does it, an odd element goes after the axis: a kernel of 2 pads 0 before and 1
        # after.
        return PaddingSite(conv, tuple(w // 2 for w in whole), tuple(w % 2 for w in whole))

    def rewrite(self, site: PaddingSite, rw: Rewriter) -> None:
        """Pad where the two sides differ, and call the op that takes numbers."""
        conv, x = site.conv, site.conv.x
        if any(site.after):
            x = _padded(x, site.after, rw)
        settings = {**conv.settings, "padding": list(site.both)}
        op = next(plain for named, plain in _PLAIN.items() if named == conv.node.target)
        rw.replace(conv.node, rw.call(op, x, conv.weight, conv.bias, *settings.values()))


def _padded(x: Node, after: Sequence[int], rw: Rewriter) -> Node:
    """Add zeros after the last axes."""
    args = x, [n for size in reversed(after) for n in (0, size)], 0.0
    value = tensor_of(x)
    if element_count(value.shape) is not None:
        return rw.call(aten.constant_pad_nd.default, *args)
    # Inferring the type would treat symbolic sizes as numbers.
    kept = value.dim() - len(after)
    sizes = [size + more for size, more in zip(value.shape, [0] * kept + [*after], strict=True)]
    return rw.replay(aten.constant_pad_nd.default, args, {}, value.new_empty(sizes))
