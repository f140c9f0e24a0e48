"""Views of convolutions: ATen's, in all spellings, and the fused quantized op."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from qfuse.ir.aten import aten
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.epilogue import Epilogue
from qfuse.ir.ops.views import QuantParams, dtype_of, node_of, optional_node, shape_of
from qfuse.ir.sizes import Size, same_size

_TRANSPOSED: tuple[OpOverload, ...] = (
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)

CONVOLUTIONS: tuple[OpOverload, ...] = (
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    *_TRANSPOSED,
    aten.convolution.default,
)
"""Every op that computes a convolution of 1 to 3 spatial axes."""

_OPERANDS = frozenset(("input", "weight", "bias"))
# Axes of a weight that are not spatial, and of an input with a batch.
_OTHERS = 2


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution of ``[batch, channels, *sizes]``, or of ``[channels, *sizes]``.

    Attributes:
        node: The call.
        x: The input.
        weight: ``[out channels, channels / groups, *kernel]``; if transposed,
            ``[channels, out channels / groups, *kernel]``.
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
        return is_call(self.node, *_TRANSPOSED) or self.settings.get("transposed", False) is True

    @property
    def is_static(self) -> bool:
        """Whether no setting is computed at run time."""
        return {self.x, self.weight, self.bias} >= set(self.node.all_input_nodes)

    @property
    def geometry(self) -> tuple[tuple[str, object], ...]:
        """The settings in canonical form, for comparing convolutions."""
        alone = {"groups", "transposed"}
        known: dict[str, object] = {
            name: value if name in alone or isinstance(value, str) else self.per_axis(name)
            for name, value in sorted(self.settings.items())
        }
        known["padding"] = self.padding
        return tuple(known.items())

    @property
    def padding(self) -> tuple[int, ...] | str:
        """The padding of both sides of every axis, or its name if the two sides differ."""
        named = self.settings["padding"]
        if named == "valid":
            return (0,) * self.spatial
        if named != "same":
            return self.per_axis("padding")
        whole = self.same_padding
        if whole is None or any(size % 2 for size in whole):
            return "same"
        return tuple(size // 2 for size in whole)

    @property
    def same_padding(self) -> tuple[int, ...] | None:
        """What ``"same"`` adds to every axis, both sides together; ``None`` for unknown kernels."""
        kernel = [size for size in shape_of(self.weight)[2:] if isinstance(size, int)]
        if len(kernel) < self.spatial:
            return None
        # torch accepts it only with unit strides.
        return tuple(d * (k - 1) for d, k in zip(self.per_axis("dilation"), kernel, strict=True))

    @property
    def spatial(self) -> int:
        """The number of spatial axes."""
        return len(shape_of(self.weight)) - _OTHERS

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
        return known * self.spatial if len(known) == 1 else known


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


@define_op("convolution")
@dataclass(frozen=True, slots=True)
class FusedConvolution(Op):
    """A ``qfuse::convolution`` call. Operands without quantization parameters are float.

    ``x`` is ``[batch, channels, *sizes]`` or ``[channels, *sizes]`` with 1 to 3 spatial axes. The
    settings have one number per spatial axis. The padding is the float 0; if it is not transposed,
    there may be twice as many numbers: those before each axis, then those after. The strides of
    the result are those of torch: channels last if ``x`` or ``weight`` is.
    """

    x: Node
    x_params: QuantParams | None
    weight: Node
    weight_params: QuantParams | None
    bias: Node | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    out_params: QuantParams | None
    epilogue: Epilogue
    extras: tuple[Node, ...]

    @staticmethod
    def reference(  # noqa: PLR0913, PLR0917 - its arguments are the op's fields
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: tuple[int, ...],
        padding: tuple[int, ...],
        dilation: tuple[int, ...],
        transposed: bool,
        output_padding: tuple[int, ...],
        groups: int,
        epilogue: Epilogue,
        extras: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Convolve, add the bias, and apply the epilogue, whose operands broadcast as in torch."""
        index = len(stride) - 1
        if transposed:
            transpose = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[index]
            y = transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
        else:
            if len(padding) > len(stride):
                sides = zip(*_halves(padding), strict=True)
                x = F.pad(x, [pad for side in reversed(list(sides)) for pad in side])
                padding = (0,) * len(stride)
            convolve = (F.conv1d, F.conv2d, F.conv3d)[index]
            y = convolve(x, weight, bias, stride, padding, dilation, groups)
        return epilogue.apply(y, extras)

    @property
    def spatial(self) -> int:
        """The number of spatial axes."""
        return len(shape_of(self.weight)) - _OTHERS

    @property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """The padding before and after every spatial axis."""
        uneven = len(self.padding) > self.spatial
        before, after = _halves(self.padding) if uneven else (self.padding, self.padding)
        return tuple(zip(before, after, strict=True))

    @property
    def axis(self) -> int:
        """The axis of the channels in ``x`` and in the result."""
        return len(shape_of(self.x)) - self.spatial - 1

    @property
    def out_channels(self) -> Size:
        """The number of channels of the result."""
        weight = shape_of(self.weight)
        return weight[1] * self.groups if self.transposed else weight[0]

    def problems(self) -> Iterator[str]:
        """Check that the operands, the settings and the groups fit each other."""
        if self.spatial not in {1, 2, 3} or self.axis not in {0, 1}:
            ranks = len(shape_of(self.x)), len(shape_of(self.weight))
            yield f"an input of rank {ranks[0]} and a weight of rank {ranks[1]}"
            return
        yield from self._check_settings()
        yield from self._check_channels()
        params = self.weight_params
        weight = dtype_of(self.weight) if params is None else params.spec.float_dtype
        if weight != self.float_dtype:
            yield f"the input is computed in {self.float_dtype}, the weight in {weight}"

    def _check_settings(self) -> Iterator[str]:
        least = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
        for name, minimum in least.items():
            values: tuple[int, ...] = getattr(self, name)
            counts = {self.spatial}
            if name == "padding" and not self.transposed:
                counts.add(2 * self.spatial)
            if len(values) not in counts or min(values) < minimum:
                yield f"the {name} is {values} for {self.spatial} spatial axes"
        if not self.transposed and any(self.output_padding):
            yield "it is not transposed and has an output padding"

    def _check_channels(self) -> Iterator[str]:
        x, weight = shape_of(self.x)[self.axis], shape_of(self.weight)
        if self.groups < 1:
            yield f"it has {self.groups} groups"
            return
        inputs = weight[0] if self.transposed else weight[1] * self.groups
        if not same_size(x, inputs) or not same_size(weight[0] % self.groups, 0):
            yield f"an input of {x} channels and a weight {tuple(weight)} in {self.groups} groups"
        bias = None if self.bias is None else shape_of(self.bias)
        if bias is not None and (len(bias) != 1 or not same_size(bias[0], self.out_channels)):
            yield f"a bias of shape {tuple(bias)} for {self.out_channels} channels"


def _halves(padding: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    middle = len(padding) // 2
    return padding[:middle], padding[middle:]


def padding_of(sides: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return a padding before and after every spatial axis as a setting of a fused convolution."""
    before, after = (tuple(side[i] for side in sides) for i in (0, 1))
    return before if before == after else (*before, *after)


as_fused_convolution = FusedConvolution.of
