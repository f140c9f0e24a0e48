"""The strides of a model's results, as its ops give them when they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from qfuse.ir.graph.stage_graph import OutputSpec, Signature
from qfuse.ir.sizes import axis_order


def with_measured_strides(signature: Signature, outputs: Sequence[Any]) -> Signature:
    """Return ``signature`` with the strides of results that were computed.

    A trace computes strides with fake tensors, where some ops treat axes of size 1 differently: a
    ``relu`` of a channels-last image with one channel is contiguous only when it runs, and so is a
    ``cat`` after it.

    Args:
        signature: The calling convention.
        outputs: The results of the captured graph on the example, mutated values first.
    """
    results = outputs[len(signature.mutations) :]

    def measured(spec: OutputSpec) -> OutputSpec:
        value = None if spec.index is None else results[spec.index]
        if not isinstance(value, torch.Tensor) or 0 in value.shape:
            return spec
        order = axis_order(value.shape, value.stride())
        # With gaps, the traced strides are those of a view.
        if order is None:
            return spec
        if spec.strides is not None:
            return replace(spec, strides=value.stride())
        return spec if spec.order is None else replace(spec, order=order)

    return replace(signature, outputs=tuple(map(measured, signature.outputs)))
