"""Runs models through Dynamo, AOTAutograd, our passes and freezing, without generating code."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import GraphModule

import qfuse
from qfuse.report import Report


@dataclass
class Frozen:
    """What came of a model.

    Attributes:
        plain: Its results without our passes.
        merged: Its results with them.
        graphs: The graphs behind freezing, with them.
        reports: What is reported.
    """

    plain: Any
    merged: Any
    graphs: list[GraphModule]
    reports: tuple[Report, ...]

    @property
    def report(self) -> Report:
        (report,) = self.reports
        return report

    def calls(self, *ops: Any) -> int:
        return sum(n.target in ops for g in self.graphs for n in g.graph.nodes)


def freeze(model: nn.Module, *args: Any, **settings: Any) -> Frozen:
    """Run a model without and with our passes; the graph behind freezing is interpreted."""
    plain = _run(model, args, None, [], settings)
    before = len(qfuse.reports())
    graphs: list[GraphModule] = []
    merged = _run(model, args, qfuse.inductor_options(), graphs, settings)
    return Frozen(plain, merged, graphs, qfuse.reports()[before:])


def freeze_report(model: nn.Module, *args: Any, **settings: Any) -> Report:
    """Run a model with our passes; return what is reported."""
    before = len(qfuse.reports())
    _run(model, args, qfuse.inductor_options(), [], settings)
    (report,) = qfuse.reports()[before:]
    return report


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    options: dict[str, Any] | None,
    graphs: list[GraphModule],
    settings: dict[str, Any],
) -> Any:
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    config: Any = importlib.import_module("torch._inductor.config")
    dynamo: Any = importlib.import_module("torch._dynamo")

    def inner(gm: GraphModule, _: object, **__: object) -> Callable[..., Any]:
        compile_fx._recursive_post_grad_passes(gm, is_inference=True)
        graphs.append(gm)

        def run(inputs: list[Any]) -> Any:
            return torch.fx.Interpreter(gm).run(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        return compile_fx.compile_fx(
            gm, inputs, inner_compile=inner, config_patches=dict(options or {})
        )

    dynamo.reset()
    settings = {**settings}
    dynamic = settings.pop("dynamic", None)
    patches = {"freezing": True, "pattern_matcher": False, **settings}
    with (
        warnings.catch_warnings(action="ignore"),
        config.patch(patches),
        _without_patterns(),
        torch.no_grad(),
    ):
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        return compiled(*args)


def _without_patterns() -> AbstractContextManager[Any]:
    """Have Inductor's patterns find nothing, which are those of the process once they are there.

    What they make of products are calls of what generates code: nothing can interpret them.
    """
    matcher: Any = importlib.import_module("torch._inductor.pattern_matcher")
    return mock.patch.object(matcher.PatternMatcherPass, "apply", return_value=0)
