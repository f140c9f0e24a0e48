"""Who is merged with whom, and who is not, for which reason."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.support.frozen_inductor import freeze
from torch import nn

import qfuse
from qfuse.inductor import merge
from qfuse.inductor.joining import plan_join
from qfuse.ir.events import MissCode
from qfuse.rewrite.rule import Miss

aten = torch.ops.aten
dynamo: Any = importlib.import_module("torch._dynamo")
PRODUCTS = (aten.mm.default, aten.addmm.default)


def linear(n: int, k: int = 16, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(k, n, bias=bias)


def assert_close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b)


class Apart(nn.Module):
    """Two groups of different inputs share their first weight, which a third reader has too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(8), linear(8), linear(12), linear(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.sin()
        return self.a(x), self.b(x), self.d(x), self.a(y), self.c(y), self.c(y).exp()


def test_a_weight_that_others_read_is_not_held_twice() -> None:
    found = freeze(Apart().eval(), torch.randn(3, 16))
    assert found.report.fired == {"combine": 1, "merge-linears": 1}  # the two of c; b and d
    assert [miss.code for miss in found.report.closest_misses][:2] == [MissCode.SHARED] * 2
    assert_close(found.plain, found.merged)


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(8), linear(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x).relu(), self.b(x).relu(), self.a(x).sigmoid()


def test_a_weight_used_twice_is_multiplied_once() -> None:
    found = freeze(Repeated().eval(), torch.randn(3, 16))
    assert found.calls(*PRODUCTS) == 1
    assert found.report.fired == {"combine": 1, "merge-linears": 1}
    assert_close(found.plain, found.merged)


class OneOther(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(8), linear(4), linear(8)
        self.other = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = torch.addmm(self.c.bias, x, self.c.weight.t(), alpha=2)
        return self.a(x), self.b(x), scaled, x @ (x.t() @ x).sin(), x + 1


def test_one_that_differs_does_not_keep_the_others_apart() -> None:
    found = freeze(OneOther().eval(), torch.randn(3, 16))
    assert found.report.fired == {"merge-linears": 1}
    reasons = [(miss.code, miss.reason) for miss in found.report.closest_misses]
    assert [code for code, _ in reasons] == [MissCode.NOT_CONSTANT, MissCode.DTYPE]
    assert "computed at run time" in reasons[0][1]
    assert "differs in alpha" in reasons[1][1]
    assert_close(found.plain, found.merged)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(8), linear(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x), self.b(x), self.a(x)


def test_equal_results_that_leave_have_memory_of_their_own() -> None:
    found = freeze(Twice().eval(), torch.randn(3, 16))
    first, _, again = found.merged
    first.zero_()
    assert_close(again, found.plain[2])


class Signs(nn.Module):
    """Sums of zeros keep their signs where a bias is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(4), linear(4, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x), self.b(x)


def test_a_missing_bias_keeps_the_sign_of_zero() -> None:
    found = freeze(Signs().eval(), -torch.rand(3, 16))
    assert found.report.fired == {"merge-linears": 1}
    assert torch.equal(found.plain[1].signbit(), found.merged[1].signbit())
    (graph,) = found.graphs
    (addmm,) = [n for n in graph.graph.nodes if n.target is aten.addmm.default]
    bias = getattr(graph, addmm.args[0].target)
    # 0.0 would turn a sum of -0.0 around, which some libraries give.
    assert bias[4:].signbit().all()
    assert not bias[4:].any()


class Views(nn.Module):
    """What is done with results: views that a part of a wider one is not, and memory itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(8), linear(8), linear(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = self.a(x), self.b(x), self.c(x)
        return a.view(-1).sin(), b.as_strided((4,), (2,)).sin(), c.transpose(0, 1), a[:, 2:4]


def test_views_of_a_part_are_those_of_the_whole() -> None:
    found = freeze(Views().eval(), torch.randn(3, 16))
    assert found.report.fired == {"merge-linears": 1}
    assert_close(found.plain, found.merged)
    assert [t.stride() for t in found.plain] == [t.stride() for t in found.merged]


class Chain(nn.Module):
    """A sibling reads what another gave: the order has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(16), linear(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x).relu()
        result: torch.Tensor = (self.b(x) * a).relu() + self.b(a)
        return result


def test_order_holds() -> None:
    found = freeze(Chain().eval(), torch.randn(3, 16))
    assert_close(found.plain, found.merged)


class Written(nn.Module):
    """The weight of a sibling is written by the model."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = linear(8), linear(8), linear(8)
        self.state: torch.Tensor
        self.register_buffer("state", torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = self.a(x), self.b(x), nn.functional.linear(x, self.state)
        self.state.add_(1)
        return out


def test_what_the_model_writes_is_no_constant() -> None:
    found = freeze(Written().eval(), torch.randn(3, 16))
    assert found.report.fired == {"merge-linears": 1}
    (miss,) = found.report.closest_misses
    assert miss.code is MissCode.NOT_CONSTANT
    assert "written by the graph" in miss.reason


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(8), linear(12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.a(x).relu(), self.b(x).view(x.shape[0], -1, 4, 3)


@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 1, 16), (7, 3, 16), (2, 0, 16)])
def test_sizes_that_vary(shape: tuple[int, ...]) -> None:
    dynamic = min(shape) > 1
    found = freeze(Rows().eval(), torch.randn(shape), dynamic=dynamic)
    assert found.report.fired == ({"merge-linears": 1} if found.calls(*PRODUCTS) else {})
    assert_close(found.plain, found.merged)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = Rows()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = self.rows(x)
        dynamo.graph_break()
        return *first, *self.rows(x.sin())


def test_a_graph_break_gives_two_reports() -> None:
    found = freeze(Broken().eval(), torch.randn(2, 5, 16))
    assert [report.fired["merge-linears"] for report in found.reports] == [1, 1]
    assert_close(found.plain, found.merged)


def test_training_is_left_alone() -> None:
    model = Rows()
    before = len(qfuse.reports())
    dynamo.reset()
    compiled = torch.compile(model, options=qfuse.inductor_options())
    a, b = compiled(torch.randn(2, 5, 16))
    (a.sum() + b.sum()).backward()
    assert model.a.weight.grad is not None
    (report,) = qfuse.reports()[before:]
    assert not report.fired
    assert all("gradients" in miss.reason for miss in report.closest_misses)
    assert report.closest_misses


class Four(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(n) for n in (8, 12, 4, 20))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x).relu() for layer in self.layers]


@pytest.mark.parametrize("guilty", range(4))
def test_one_that_cannot_be_joined_keeps_the_others_not(
    monkeypatch: pytest.MonkeyPatch, guilty: int
) -> None:
    width = (8, 12, 4, 20)[guilty]

    def picky(parts: Any, *rest: Any) -> Any:
        for part in parts:
            if width in part.meta["val"].shape:
                source = part.all_input_nodes[0]
                return Miss(MissCode.NOT_CONSTANT, source, "it is packed otherwise", progress=3)
        return plan_join(parts, *rest)

    monkeypatch.setattr(merge, "plan_join", picky)
    found = freeze(Four().eval(), torch.randn(3, 16))
    assert found.report.fired == {"merge-linears": 1}
    assert found.calls(*PRODUCTS) == 2
    (miss,) = found.report.closest_misses
    assert miss.reason == "it is packed otherwise"
    assert [c for c in miss.anchor.module if c.isdigit()] == [str(guilty)]
    assert_close(found.plain, found.merged)


class Stored(nn.Module):
    """Weights as PT2E stores them: of one type, of another range, along the other axis."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(4):
            self.register_buffer(f"w{i}", torch.randint(-127, 128, (16, 16)).to(torch.int8))
            self.register_buffer(f"s{i}", torch.rand(16) / 100)
            self.register_buffer(f"z{i}", torch.zeros(16, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        ops = torch.ops.quantized_decomposed
        q = ops.quantize_per_tensor(x, 0.05, 128, 0, 255, torch.uint8)
        outs = []
        for i, (axis, low) in enumerate([(0, -128), (1, -128), (0, -127), (0, -128)]):
            real = ops.dequantize_per_tensor(q, 0.05, 128, 0, 255, torch.uint8)
            own = [getattr(self, f"{name}{i}") for name in "wsz"]
            weight = ops.dequantize_per_channel(*own, axis, low, 127, torch.int8)
            outs.append(nn.functional.linear(real, weight).relu())
        return outs


def test_static_weights_stay_stored_and_others_stay_apart() -> None:
    import torch.ao.quantization.fx._decomposed  # noqa: PLC0415 - registers ops

    found = freeze(Stored().eval(), torch.randn(3, 16))
    assert found.report.fired["merge-linears"] == 1
    channels = torch.ops.quantized_decomposed.dequantize_per_channel.default
    assert found.calls(channels) == 3
    assert found.calls(aten.cat.default) == 0
    codes = [miss.code for miss in found.report.closest_misses]
    assert codes == [MissCode.NOT_CONSTANT, MissCode.DTYPE]
    assert_close(found.plain, found.merged)


class OneScale(nn.Module):
    """Weights with one scale each, of which two are alike."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(3):
            self.register_buffer(f"w{i}", torch.randint(-127, 128, (8, 16)).to(torch.int8))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        real = torch.ops.quantized_decomposed.dequantize_per_tensor
        outs = []
        for i, scale in enumerate([0.02, 0.02, 0.03]):
            weight = real(getattr(self, f"w{i}"), scale, 0, -128, 127, torch.int8)
            outs.append(nn.functional.linear(x, weight).relu())
        return outs


def test_weights_of_another_scale_stay_apart_and_the_reason_names_it() -> None:
    import torch.ao.quantization.fx._decomposed  # noqa: PLC0415 - registers ops

    found = freeze(OneScale().eval(), torch.randn(3, 16))
    assert found.report.fired["merge-linears"] == 1
    assert found.calls(*PRODUCTS) == 2
    (miss,) = found.report.closest_misses
    assert miss.code is MissCode.DTYPE
    assert miss.reason.endswith("differs in the scale of self of mat2")
    assert_close(found.plain, found.merged)


class Float8(nn.Module):
    """float8, one scale for all of a weight."""

    def __init__(self, *scales: float) -> None:
        super().__init__()
        for i, scale in enumerate(scales):
            self.register_buffer(f"w{i}", torch.randn(16, 32).to(torch.float8_e4m3fn))
            self.register_buffer(f"s{i}", torch.tensor(scale))
        self.count = len(scales)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        one = torch.ones((), dtype=torch.float32)
        codes = x.to(torch.float8_e4m3fn)
        outs = []
        for i in range(self.count):
            w, s = getattr(self, f"w{i}"), getattr(self, f"s{i}")
            out = torch._scaled_mm(codes, w.t(), one, s, out_dtype=torch.bfloat16)
            outs.append(out.float().sin())
        return outs


def test_products_scaled_as_a_whole_are_merged_if_the_scale_is_one() -> None:
    found = freeze(Float8(0.5, 0.25, 0.5).eval(), torch.randn(16, 32))
    assert found.report.fired["merge-linears"] == 1
    assert found.calls(aten._scaled_mm.default) == 2
    (miss,) = found.report.closest_misses
    assert miss.reason.endswith("differs in scale_b")
    assert_close(found.plain, found.merged)


class Rowwise(nn.Module):
    """float8, activations and weights: the op wants its matrix turned."""

    def __init__(self) -> None:
        super().__init__()
        for i, n in enumerate((32, 16)):
            self.register_buffer(f"w{i}", torch.randn(n, 32).to(torch.float8_e4m3fn))
            self.register_buffer(f"s{i}", torch.rand(1, n))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scale = x.abs().amax(1, keepdim=True) / 448
        codes = (x / scale).to(torch.float8_e4m3fn)
        outs = []
        for i in range(2):
            w, s = getattr(self, f"w{i}"), getattr(self, f"s{i}")
            out = torch._scaled_mm(codes, w.t(), scale, s, out_dtype=torch.bfloat16)
            outs.append(out.float().sin())
        return outs


def test_float8_products() -> None:
    found = freeze(Rowwise().eval(), torch.randn(16, 32))
    assert found.report.fired == {"merge-linears": 1}
    assert found.calls(aten._scaled_mm.default) == 1
    assert_close(found.plain, found.merged)
