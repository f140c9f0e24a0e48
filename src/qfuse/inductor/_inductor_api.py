"""Inductor's pass slots, counters and frozen weights: the only file here with private torch API.

It imports ``torch._inductor``, so ``import qfuse`` must not import it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.schemas import MutationType
from torch._guards import TracingContext
from torch._inductor import config, constant_folding, custom_graph_pass, inductor_prims
from torch._inductor.custom_graph_pass import get_custom_graph_passes
from torch._inductor.virtualized import V
from torch.fx import Graph
from torch.utils._python_dispatch import _disable_current_modes

from qfuse.rewrite.prelude import Node, OpOverload

_COUNTERS = "inductor"

CustomGraphPass = custom_graph_pass.CustomGraphPass
"""A pass with a ``uuid()``, which Inductor's caches need."""

LOW_MEMORY_POOL: OpOverload = inductor_prims._low_memory_max_pool_with_offsets
"""Max pooling after decompositions."""


def option(name: str) -> Any:
    """Return the value of an option of Inductor."""
    return getattr(config, name)


def set_option(name: str, value: Any) -> None:
    """Set an option of Inductor, for all compilations of the process."""
    setattr(config, name, value)


def patched(values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Set options of Inductor for a region."""
    context: AbstractContextManager[None] = config.patch(dict(values))
    return context


def passes_in(value: Any) -> tuple[Any, ...]:
    """Return the passes in a slot, in execution order."""
    found: tuple[Any, ...] = get_custom_graph_passes(value)
    return found


def freezing_is_on() -> bool:
    """Whether freezing is enabled; Dynamo reads this before tracing, if gradients are off."""
    return bool(config.freezing)


def count(key: str) -> None:
    """Increment Inductor's counter ``key``.

    Inductor stores the counts of a compilation with the compiled graph, and adds them again when
    the graph is loaded from the FX graph cache, in this process or another.
    """
    counters[_COUNTERS][key] += 1


def counted(prefix: str) -> dict[str, int]:
    """Return all counts whose key begins with ``prefix``."""
    return {k: n for k, n in list(counters[_COUNTERS].items()) if str(k).startswith(prefix)}


def frozen_inputs(graph: Graph) -> dict[Node, torch.Tensor]:
    """Return the placeholders that freezing will turn into constants, with their values.

    In the joint pass of a frozen compilation, weights are still placeholders. Their values are only
    in the tracing context, which has none without freezing. Placeholders that the graph mutates, or
    returns as a view, stay inputs.
    """
    context = TracingContext.try_get()
    if context is None or context.fw_metadata is None or is_training(graph):
        return {}
    values = context.params_flat_unwrap_subclasses or ()
    metadata = context.fw_metadata
    # A buffer that the graph writes, such as a KV cache, has another value in the next call.
    written = (MutationType.MUTATED_IN_GRAPH, MutationType.MUTATED_OUT_GRAPH)
    kept = {i for i, info in enumerate(metadata.input_info) if info.mutation_type in written}
    # The caller could write to a constant through an output that is a view of it.
    kept |= {info.base_idx for info in metadata.output_info if info.base_idx is not None}
    placeholders = graph.find_nodes(op="placeholder")
    # Parameters precede inputs.
    return {
        node: value
        for index, (node, value) in enumerate(zip(placeholders, values, strict=False))
        if index not in kept and isinstance(value, torch.Tensor)
    }


def is_packaged() -> bool:
    """Whether AOTInductor is compiling; its packages hold weights by name."""
    return bool(V.aot_compilation)


def is_training(graph: Graph) -> bool:
    """Whether AOTAutograd traced ``graph`` to compute gradients."""
    # AOTAutograd names the inputs of a joint graph so.
    names = (str(node.target) for node in graph.find_nodes(op="placeholder"))
    return any(name.startswith(("primals_", "tangents_")) for name in names)


def folds(node: Node, leaves: Collection[Node]) -> bool:
    """Whether freezing folds a node that has only constant operands.

    It does not fold ops that its patterns match: any dequantize, and the cast of an int8 weight to
    bfloat16, transposed or not, if its operand is a constant and not computed from one.

    Args:
        node: The call.
        leaves: The nodes that will become constants.
    """
    if node.target in constant_folding._dont_constant_fold or _dequantizes(node):
        return False
    # The transposition between an int8 weight and its cast is a part of the pattern.
    if node.target is torch.ops.aten.permute.default and len(node.users) == 1:
        (user,) = node.users
        return not (node.args[0] in leaves and _casts_int8(user))
    if not _casts_int8(node):
        return True
    source = node.args[0]
    turned = getattr(source, "target", None) is torch.ops.aten.permute.default
    if turned and isinstance(source, Node):
        return len(source.users) != 1 or source.args[0] not in leaves
    return source not in leaves


def _dequantizes(node: Node) -> bool:
    name = getattr(node.target, "_schema", None)
    kept = ("dequantize_per_channel", "dequantize_per_tensor", "convert_element_type")
    return name is not None and name.name in {f"quantized_decomposed::{op}" for op in kept}


def _casts_int8(node: Node) -> bool:
    if node.target is not torch.ops.prims.convert_element_type.default:
        return False
    value = getattr(node.args[0], "meta", {}).get("val")
    stored = isinstance(value, torch.Tensor) and value.dtype is torch.int8
    return stored and node.args[1] is torch.bfloat16


def mark_frozen(tensor: torch.Tensor) -> None:
    """Register a constant as a frozen weight: caches store its name instead of its values."""
    tensor._is_frozen_param = True  # type: ignore[attr-defined]


def on_real_tensors() -> AbstractContextManager[None]:
    """Disable the fake and proxy modes of a compilation, to compute with real values."""
    context: AbstractContextManager[None] = _disable_current_modes()
    return context


def has_kernel(op: OpOverload, key: str) -> bool:
    """Whether an op has a kernel of its own for a dispatch key, such as ``CPU``."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(
        op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else ""), key
    )
    return found
