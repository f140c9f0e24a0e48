"""Quantizing an exported graph with PT2E and torchao's X86InductorQuantizer."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from qfuse.zoo import _torchao_api as ao
from qfuse.zoo.family import Example
from qfuse.zoo.notes import Note, Outcome, group_notes

_ATEN = torch.ops.aten
_WEIGHTED = frozenset(
    {
        _ATEN.linear.default,
        _ATEN.conv1d.default,
        _ATEN.conv1d.padding,
        _ATEN.conv2d.default,
        _ATEN.conv2d.padding,
        _ATEN.conv3d.default,
        _ATEN.conv3d.padding,
        _ATEN.conv_transpose1d.default,
        _ATEN.conv_transpose2d.input,
        _ATEN.conv_transpose3d.input,
    }
)
_PRODUCTS = frozenset(
    {_ATEN.matmul.default, _ATEN.bmm.default, _ATEN.scaled_dot_product_attention.default}
)


def quantize_exported(
    model: nn.Module,
    example: Example,
    dynamic_shapes: Any,
    examples: Iterable[Example],
    *,
    dynamic: bool,
) -> Outcome:
    """Export a copy of `model` and quantize the ops that X86InductorQuantizer supports.

    Args:
        model: The float module. It is not changed.
        example: Inputs to export with.
        dynamic_shapes: In the format of `torch.export`.
        examples: Inputs to calibrate with.
        dynamic: Quantize activations dynamically, without calibration.
    """
    args, kwargs = example
    # torchao draws example inputs for its patterns from the global generator.
    with ao.loaded(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        # Exporting and calibrating would write to the buffers of the model itself.
        source = copy.deepcopy(model).eval()
        program = torch.export.export(
            source, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
        prepared = ao.prepare_model(program, dynamic=dynamic)
        state = {name: value.clone() for name, value in source.named_buffers()}
        # Weight observers need one run even if activations are not observed.
        for inputs, keywords in [example] if dynamic else examples:
            prepared(*inputs, **keywords)
        _restore(prepared, state)
        converted = ao.convert(prepared)
    layers = sum(node.target in _WEIGHTED and _is_quantized(node) for node in converted.graph.nodes)
    return Outcome(converted, layers, _left_float(converted))


class Autocast(nn.Module):
    """Runs a module with its matrix products in bfloat16."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the inner module under CPU autocast."""
        # Without the cache: it would keep casts of weights alive across calls and graphs.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return self.inner(*args, **kwargs)


def under_autocast(inner: nn.Module) -> Autocast:
    """Return `inner` under bfloat16 autocast, with the same argument names.

    `torch.export` matches dynamic shapes with the names that the signature of `forward` gives, so
    the wrapper needs the signature of what it wraps: a class of its own.
    """

    def forward(self: Autocast, *args: Any, **kwargs: Any) -> Any:
        return Autocast.forward(self, *args, **kwargs)

    signature = inspect.signature(inner.forward)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[itself, *signature.parameters.values()]
    )
    kind: type[Autocast] = type("Autocast", (Autocast,), {"forward": forward})
    return kind(inner)


def _restore(module: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Restore the model's buffers that calibration wrote, such as a key-value cache."""
    for name, value in module.named_buffers():
        if name in state:
            value.copy_(state[name])


def _left_float(module: GraphModule) -> tuple[Note, ...]:
    """Note the matmuls that the quantizer left in float."""
    found = [
        (_place(node), f"X86InductorQuantizer left this {_name(node)} in float")
        for node in module.graph.nodes
        if node.target in _WEIGHTED and not _is_quantized(node)
    ]
    products = Counter(
        _name(node)
        for node in module.graph.nodes
        if node.target in _PRODUCTS and not _is_quantized(node)
    )
    found += [
        (f"{name} ({count})", "X86InductorQuantizer's default leaves products of activations float")
        for name, count in products.items()
    ]
    found += [
        (_place(node), "an embedding is a table that is looked up, not multiplied: it stays float")
        for node in module.graph.find_nodes(op="call_function", target=_ATEN.embedding.default)
    ]
    return group_notes(found)


def _is_quantized(node: Node) -> bool:
    """Return whether both operands of a matmul are dequantized."""
    return all(
        isinstance(factor, torch.fx.Node) and "dequantize" in _name(factor)
        for factor in node.args[:2]
    )


def _name(node: Node) -> str:
    """Return the operator's name without namespace and overload."""
    return str(node.target).split(".")[-2] if "." in str(node.target) else str(node.target)


def _place(node: Node) -> str:
    """Return the module of the user's model that a node came from."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return str(paths[-1]) if paths and paths[-1] else node.name
