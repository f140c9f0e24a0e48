"""Models whose linears are written out, and what normalize makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from tests.support.sources.aten_spellings import codes, scales, truth
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_structure

from qfuse.capture import capture
from qfuse.ir.events import Exactness, RolledBack
from qfuse.ir.graph.stage_graph import CapturedGraph, NormalGraph
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.rewrite.clone import clone
from qfuse.rewrite.compare import compare
from qfuse.rewrite.context import RewriteContext
from qfuse.rewrite.site_check import SiteChecker
from qfuse.rewrite.tolerance import SITE
from qfuse.testing.run import run

# Enough features that their noise has a root mean square even in one row.
K, N = 64, 48
DYNAMIC = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=64)}


class Spelled(nn.Module):
    """A linear whose forward is written out, on stored parameters."""

    w: torch.Tensor
    b: torch.Tensor
    q: torch.Tensor
    q_t: torch.Tensor
    s: torch.Tensor
    s_col: torch.Tensor
    s_group: torch.Tensor
    sums: torch.Tensor

    def __init__(self, write: Callable[[Spelled, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._write = write
        self.register_buffer("w", torch.randn(N, K))
        self.register_buffer("b", torch.randn(N))
        self.register_buffer("q", codes(N, K))
        self.register_buffer("q_t", codes(K, N))
        self.register_buffer("s", scales(N))
        self.register_buffer("s_col", scales(N, 1))
        self.register_buffer("s_group", scales(N, 4))
        self.register_buffer("sums", self.q.sum(1, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._write(self, x)


class Each(nn.Module):
    """Several models in eval mode on one input."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        # Not by `eval`, which an exported model refuses.
        self.training = self.models.training = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(model(x) for model in self.models)


def captured_each(
    models: Mapping[str, nn.Module], x: torch.Tensor, shapes: object = None
) -> dict[str, CapturedGraph]:
    """Capture models together, which takes as long as one of them; return the graph of each."""
    program = capture(Each(list(models.values())), (x,), dynamic_shapes=shapes)
    assert program.signature.mutations == (), "the outputs of the graph are those of the models"
    return {name: _only(program, index) for index, name in enumerate(models)}


def _only(program: CapturedGraph, index: int) -> CapturedGraph:
    """Return a copy with one of the results."""
    part = clone(program)
    spec = part.signature.outputs[index]
    assert spec.index is not None, "a model gives a tensor"
    output = part.graph.output_node()
    values = output.args[0]
    assert isinstance(values, (tuple, list)), "the output is one flat tuple"
    output.args = ((values[spec.index],),)
    part.graph.eliminate_dead_code()
    part.module.recompile()
    signature = replace(
        part.signature, outputs=(replace(spec, index=0),), out_spec=tree_structure(0)
    )
    return replace(part, signature=signature)


def normalized(model: nn.Module, x: torch.Tensor, *, dynamic: bool = False) -> NormalGraph:
    """Capture and normalize; check every rewrite, and the whole."""
    program = capture(model.eval(), (x,), dynamic_shapes=(DYNAMIC,) if dynamic else None)
    return normalized_graph(program, x)


def normalized_graph(source: CapturedGraph, x: torch.Tensor, *others: torch.Tensor) -> NormalGraph:
    """Normalize a copy; check every rewrite on ``x``, and the whole on all inputs."""
    program = clone(source)
    context = RewriteContext("normalize", checker=SiteChecker(program, [x]))
    normal = normalize(program, context)
    assert not normal.log.of(RolledBack)
    for value in (x, *others):
        new, old = run(normal, [value])[0], run(source, [value])[0]
        verdict = compare(new, old, truth(source, [value])[0], Exactness.ROUNDING, SITE)
        assert verdict.wrong is None, f"{verdict.wrong}\n{to_text(normal.graph)}"
    return normal
