"""Write the pictures of docs/page.md: ``python tools/page_pictures.py [FOLDER]``.

That of a trace is drawn from its JSON by :mod:`trace_picture`, since the viewers are web pages.

The model is BERT from the zoo with two layers, quantized to int8 with dynamic activations, and
three problems: a linear that was left in float, one whose weight is quantized along the wrong axis,
and one that rounds activations down. Needs Chromium.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from trace_picture import trace_page

import qfuse
from qfuse import zoo
from qfuse.zoo import recipes
from qfuse_bench.harness.browser import Browser

WIDTH, HEIGHT, TRACE_HEIGHT = 1400, 800, 420


class WrongAxis(nn.Module):
    """An int8 linear with one scale per input."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(0) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", torch.round(linear.weight.detach() / scale).to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product in float."""
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class RoundsDown(nn.Module):
    """An int8 linear with activations that are rounded down."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", torch.round(linear.weight.detach() / scale).to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of activations that are rounded down."""
        q = torch.clamp(torch.floor(x / 0.05), -128, 127).to(torch.int8)
        weight = self.weight.to(x.dtype) * self.scale
        return nn.functional.linear(q.to(x.dtype) * 0.05, weight, self.bias)


def planted() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """The model and its inputs."""
    made = zoo.build("bert", layers=2, seq=64)
    first, second = made.module.encoder.layer
    linears = {
        first.output: first.output.dense,
        first.intermediate: first.intermediate.dense,
        second.attention.output: second.attention.output.dense,
    }
    kinds = (nn.Identity, WrongAxis, RoundsDown)
    kwargs = dict(made.kwargs)
    quantized = recipes.quantize(made.module, "w8a8-dynamic", made.args, kwargs).model
    owners = dict(quantized.named_modules())
    names = [name for name, module in made.module.named_modules() if module in linears]
    for owner, kind in zip(linears, kinds, strict=True):
        name = next(n for n in names if made.module.get_submodule(n) is owner)
        linear = linears[owner]
        owners[name].dense = linear if kind is nn.Identity else kind(linear)
    return quantized, made.args, kwargs


def plot() -> str:
    """The accuracy per layer of the model without the problems, as an image."""
    made = zoo.build("bert", layers=2, seq=64)
    kwargs, again = dict(made.kwargs), zoo.build("bert", layers=2, seq=64).module
    quantized = recipes.quantize(again, "w8a8-dynamic", made.args, kwargs).model
    return qfuse.measure_accuracy(quantized, made.module, made.args, kwargs, keep=0).to_svg()


def main() -> None:
    """Compile, measure, and take the pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    model, args, kwargs = planted()
    fast = qfuse.compile(model, args, kwargs)
    profile = fast.profile(*args, **kwargs)
    print(profile)
    with tempfile.TemporaryDirectory() as pages, Browser(WIDTH, HEIGHT) as browser:
        page = Path(pages, "page.html")
        fast.report.to_html(page, profile=profile)
        browser.open(page)
        browser.frame()
        browser.screenshot(folder / "page.png")
        browser.click("#rows [data-row='0']")
        browser.eval("document.getElementById('graph').scrollIntoView()")
        browser.frame()
        browser.screenshot(folder / "page-graph.png")
        browser.eval("document.getElementById('timeline').scrollIntoView()")
        browser.frame()
        browser.screenshot(folder / "page-timeline.png")
    with tempfile.TemporaryDirectory() as pages, Browser(WIDTH, TRACE_HEIGHT) as browser:
        profile.save_chrome_trace(trace := Path(pages, "trace.json"))
        drawn = Path(pages, "trace.html")
        drawn.write_text(trace_page(json.loads(trace.read_text())), encoding="utf-8")
        browser.open(drawn)
        browser.frame()
        browser.screenshot(folder / "trace.png", whole=True)
    (folder / "accuracy.svg").write_text(plot() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
