"""Constant folding of calls with small results."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx.node import map_arg

from qfuse.ir.graph.alias import leaves_graph
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import StageGraph, constant_of
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.session import Applied, RewriteSession

FOLDED_BYTES = 1 << 16
"""The largest result: scales, zero points and their reciprocals fit, and weights stay quantized."""


def fold_constants(program: StageGraph, context: RewriteContext) -> int:
    """Replace small pure calls on constants by their values; return how many were folded.

    The value is computed by the ATen op that would run at run time, so this is exact.
    """
    session = RewriteSession(program, context)
    folded = 0
    for node in list(program.graph.nodes):
        # The caller may write to an output, so every call must return a new tensor.
        value = None if leaves_graph(node) else _value(node)
        if value is not None:
            edit = partial(_fold, node, value)
            done = session.rewrite_always("fold-constants", node, edit, proof=Exactness.EXACT)
            folded += isinstance(done, Applied)
    return folded


def _fold(node: Node, value: torch.Tensor, rw: Rewriter) -> None:
    rw.replace(node, rw.constant(value, f"{node.name}_folded"))


def drop_unused_constants(program: StageGraph) -> None:
    """Delete constants without users, such as the originals of packed weights."""
    used = {str(n.target) for n in program.graph.nodes if n.op == "get_attr"}
    written = {m.buffer for m in program.signature.mutations}
    for name in list(dict(program.module.named_buffers(remove_duplicate=False))):
        # A buffer that the program writes is state of
        # the caller's module, even if nothing reads it.
        if name not in used and name not in written:
            owner, _, leaf = name.rpartition(".")
            delattr(program.module.get_submodule(owner), leaf)


def _value(node: Node) -> torch.Tensor | None:
    op = overload_of(node)
    if op is None or op.namespace != "aten" or not node.all_input_nodes:
        return None
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor) or any(not isinstance(s, int) for s in fake.shape):
        return None
    if fake.numel() * fake.element_size() > FOLDED_BYTES:
        return None
    # `bernoulli` of a constant differs from call to call.
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None
    inputs = {n: constant_of(n) for n in node.all_input_nodes}
    if any(v is None for v in inputs.values()):
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: inputs[n])
    with torch.no_grad():
        result: Any = op(*args, **kwargs)
    # A view would keep the whole base alive for a few elements.
    return result.clone()  # type: ignore[no-any-return]
