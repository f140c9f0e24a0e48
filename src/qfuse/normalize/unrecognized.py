"""Quantized ops that no dialect matched: logged if they can run, an error if they cannot."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from qfuse.ir.events import Missed, Noted
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import REFUSED_META, NormalGraph, op_name, place_of
from qfuse.normalize.importers.dialect import Dialect
from qfuse.normalize.importers.errors import cannot_run
from qfuse.rewrite.prelude import Node, OpOverload
from qfuse.targets.kernels import KernelProbe, KernelState, probe_kernel

_QUANTIZED = frozenset({"quantized_decomposed", "torchao", "quantized", "onednn"})

# Dispatch keys besides the device's own at which a kernel may be registered.
_COMPOSITE = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "Autograd",
)
_DEVICE_KEYS = {"cpu": ("CPU", "MkldnnCPU", "QuantizedCPU"), "cuda": ("CUDA", "QuantizedCUDA")}


def note_unrecognized(program: NormalGraph, dialects: Sequence[Dialect], stage: str) -> None:
    """Log every quantized op of a source dialect that is still in the graph.

    Raises:
        NormalizeError: One of them has no kernel on its device.
    """
    namespaces = _QUANTIZED.union(*(d.namespaces for d in dialects))
    limits = {op: why for d in dialects for op, why in d.limits.items()}
    misses = _closest(program)
    for node in program.graph.nodes:
        op = overload_of(node)
        if op is None:
            continue
        if _is_fake_quantize(op):
            text = f"{op_name(node)} rounds in float: convert the model, as with convert_pt2e"
            program.log.add(Noted(stage, text, place_of(node), warn=True))
        name = _qualified(op).partition(".")[0]
        missed = misses.get(node.name)
        # For later stages, which see only that the op is still there.
        if missed is not None:
            node.meta[REFUSED_META] = f"the rule {missed.rule} refused: {missed.reason}"
        elif name in limits:
            node.meta[REFUSED_META] = f"no dialect translates: {limits[name]}"
        if op.namespace not in namespaces and name not in limits:
            continue
        if not _has_kernel(op, node):
            raise cannot_run(
                node,
                f"{op} has a schema but no kernel here, so it can never run",
                fix="install a build of its package that has the kernel, "
                "or quantize with another recipe",
            )
        # The refusal names this very call, a limit only its op.
        why = missed.reason if missed is not None else limits.get(name)
        text = f"{op_name(node)} stays as it is: {why or 'no dialect supports it'}"
        program.log.add(Noted(stage, text, place_of(node), warn=True))


def _closest(program: NormalGraph) -> dict[str, Missed]:
    """Return the miss of the rule that came closest, by the name of the node."""
    closest: dict[str, Missed] = {}
    for miss in program.log.of(Missed):
        best = closest.get(miss.anchor.node)
        if best is None or miss.progress > best.progress:
            closest[miss.anchor.node] = miss
    return closest


def _is_fake_quantize(op: OpOverload) -> bool:
    """Whether ``op`` is one of quantization-aware training, which returns floats."""
    return op.namespace == "aten" and "fake_quant" in str(op).partition(".")[2]


def _has_kernel(op: OpOverload, node: Node) -> bool:
    """Whether a call has a kernel; calls on the meta device are not checked."""
    keys = _DEVICE_KEYS.get(_device_of(node))
    if keys is None:
        return True
    return any(
        probe_kernel(KernelProbe(_qualified(op), key)) is KernelState.AVAILABLE
        for key in (*keys, *_COMPOSITE)
    )


def _qualified(op: OpOverload) -> str:
    """Return ``namespace::op``, or ``namespace::op.overload``."""
    namespace, name, overload = str(op).split(".")
    return f"{namespace}::{name}" if overload == "default" else f"{namespace}::{name}.{overload}"


def _device_of(node: Node) -> str:
    value = node.meta.get("val")
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return value.device.type if isinstance(value, torch.Tensor) else ""
