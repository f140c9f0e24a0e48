"""Float convolutions of sequences, ``conv1d``, as convolutions of channels-last images."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qfuse.ir.graph.stage_graph import CLAIM_META, SITE_META, constant_of, site_of
from qfuse.ir.ops.convolution import Convolution, as_convolution
from qfuse.ir.ops.views import dtype_of, tensor_of
from qfuse.ir.sizes import is_row_major
from qfuse.rewrite.prelude import Exactness, Node, Rewriter, aten
from qfuse.rewrite.regions import cloned_in_order
from qfuse.rewrite.session import RewriteSession
from qfuse.targets.target import Target

# Of a batch of images.
_ROWS_AXIS = 2


def lower_conv1d(session: RewriteSession, target: Target) -> None:
    """Convolve batches of sequences as channels-last images of one row, with a constant weight.

    oneDNN copies the input, the weight and the result of a ``conv1d`` to layouts of its own in
    every call. Here the weight is stored as it is read, and the compiler computes the other two
    copies in the loops around the convolution. Without AMX, groups take longer so; in float32, the
    copies take longer than they save: both stay. docs/kernels.md has the times.
    """
    weights: dict[str, torch.Tensor] = {}
    for node in list(session.program.graph.nodes):
        convolution = as_convolution(node)
        if convolution is not None and _is_covered(convolution, target):
            edit = _AsImage(convolution, weights)
            session.rewrite("lower-conv1d", node, edit, proof=Exactness.ROUNDING)


def _is_covered(convolution: Convolution, target: Target) -> bool:
    """Whether the convolution of images takes at most as long as this one."""
    weight, result = constant_of(convolution.weight), tensor_of(convolution.node)
    return bool(
        convolution.spatial == 1
        and convolution.axis == 1
        and weight is not None
        and convolution.is_static
        and CLAIM_META not in convolution.node.meta
        and not convolution.transposed
        and (convolution.groups == 1 or target.has_onednn_amx)
        # Padding that differs between the sides of an axis, which torch copies the input for.
        and not isinstance(convolution.padding, str)
        and dtype_of(convolution.node) is torch.bfloat16
        and result.device.type == "cpu"
        # Torch may return adjacent channels for a single channel.
        and any(map(is_row_major, (result, result.transpose(1, 2))))
    )


@dataclass(frozen=True, slots=True)
class _AsImage:
    """Replaces one convolution.

    Attributes:
        convolution: The convolution.
        weights: The weights of images by the names of those of sequences, which calls may share.
    """

    convolution: Convolution
    weights: dict[str, torch.Tensor]

    def __call__(self, rw: Rewriter) -> None:
        convolution, node = self.convolution, self.convolution.node
        image = rw.call(aten.unsqueeze.default, convolution.x, _ROWS_AXIS)
        image = rw.call(aten.clone.default, image, memory_format=torch.channels_last)
        padding = convolution.padding
        assert not isinstance(padding, str), "uneven padding is not covered"
        stride, dilation = convolution.per_axis("stride"), convolution.per_axis("dilation")
        y = rw.call(
            aten.conv2d.default,
            image,
            self._weight(rw),
            convolution.bias,
            [1, *stride],
            [0, *padding],
            [1, *dilation],
            convolution.groups,
        )
        y.meta[SITE_META] = site_of(node)
        rows = rw.call(aten.squeeze.dim, y, _ROWS_AXIS)
        # The loops that read the result compute this copy on the fly.
        if is_row_major(tensor_of(node)):
            made = rw.call(aten.clone.default, rows, memory_format=torch.contiguous_format)
        else:
            made = cloned_in_order(rows, (0, 2, 1), rw)
        rw.replace(node, made)

    def _weight(self, rw: Rewriter) -> Node:
        """Store the weight as one of channels-last images."""
        node = self.convolution.weight
        name = str(node.target)
        stored = self.weights.get(name)
        if stored is None:
            held = constant_of(node)
            assert held is not None, "the weight is constant"
            image = held.unsqueeze(_ROWS_AXIS)
            stored = self.weights[name] = image.clone(memory_format=torch.channels_last)
        return rw.constant(stored, f"{name}_channels_last")
