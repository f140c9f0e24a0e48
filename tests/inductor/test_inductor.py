"""Through all of Inductor, down to code that runs."""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import qfuse
from qfuse.ir.events import MissCode

if TYPE_CHECKING:
    from pathlib import Path

config: Any = importlib.import_module("torch._inductor.config")
dynamo: Any = importlib.import_module("torch._dynamo")
passes: Any = importlib.import_module("torch._inductor.custom_graph_pass")

pytestmark = pytest.mark.slow

PATCHES = {"freezing": True, "cpp.vec_isa_ok": True, "fx_graph_cache": False}


class Two(nn.Module):
    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, n), nn.Linear(16, n, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x).relu(), self.b(x)


class Last(passes.CustomGraphPass):  # type: ignore[misc]
    """Looks at what becomes code."""

    def __init__(self) -> None:
        self.targets: list[str] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.targets += [str(n.target) for n in graph.nodes if n.op == "call_function"]

    def uuid(self) -> None:
        return None


@pytest.mark.parametrize("own", [False, True])
def test_inductors_own_concat_linear_finds_nothing_left(*, own: bool) -> None:
    dynamo.reset()
    model, x, last = Two().eval(), torch.randn(3, 16), Last()
    with torch.no_grad(), config.patch({**PATCHES, "cpp.enable_concat_linear": own}):
        options = qfuse.inductor_options(post_grad_custom_post_pass=last)
        found = torch.compile(model, options=options)(x)
    torch.testing.assert_close(found, model(x))
    assert qfuse.reports()[-1].fired == {"merge-linears": 1}
    assert sum("linear" in t or "mm" in t for t in last.targets) == 1
    assert not any("cat" in t for t in last.targets)
    assert found[1].is_contiguous()


def test_the_second_call_and_other_sizes_are_right() -> None:
    dynamo.reset()
    model = Two().eval()
    with torch.no_grad(), config.patch(PATCHES):
        compiled = torch.compile(model, options=qfuse.inductor_options(), dynamic=True)
        for rows in (3, 3, 5, 1):
            x = torch.randn(rows, 16)
            before = x.clone()
            torch.testing.assert_close(compiled(x), model(x))
            assert torch.equal(x, before)


def test_two_models_from_two_threads() -> None:
    dynamo.reset()
    models = [Two(8).eval(), Two(12).eval()]
    results: dict[int, Any] = {}
    x = torch.randn(3, 16)

    def work(index: int) -> None:
        # Inductor's options hold for one thread.
        with torch.no_grad(), config.patch(PATCHES), qfuse.inductor_passes():
            results[index] = torch.compile(models[index])(x)

    before = len(qfuse.reports())
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, model in enumerate(models):
        torch.testing.assert_close(results[index], model(x))
    fired = [report.fired["merge-linears"] for report in qfuse.reports()[before:]]
    assert fired == [1, 1]


def test_a_package_keeps_its_weights_and_the_report_says_why(tmp_path: Path) -> None:
    model, x = Two().eval(), torch.randn(3, 16)
    with torch.no_grad(), config.patch({**PATCHES, "aot_inductor.compile_wrapper_opt_level": "O0"}):
        place = torch._inductor.aoti_compile_and_package(
            torch.export.export(model, (x,)),
            package_path=str(tmp_path / "two.pt2"),
            inductor_configs=qfuse.inductor_options(),
        )
    loaded = torch._inductor.aoti_load_package(place)
    torch.testing.assert_close(tuple(loaded(x)), model(x))
    report = qfuse.reports()[-1]
    assert not report.fired
    misses = report.closest_misses
    assert [miss.code for miss in misses] == [MissCode.NOT_CONSTANT] * 2
    assert all("AOTInductor" in miss.reason and "qfuse.compile" in miss.reason for miss in misses)
