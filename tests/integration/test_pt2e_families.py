"""What PT2E makes of small models of every family: what has to fuse, and the values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qfuse
from qfuse.rewrite.tolerance import FLIPPED_POWER
from qfuse.targets import Target
from qfuse.zoo import recipes

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.own_kernels,
    pytest.mark.export,
    # The quantizer skips a pool of floats, and warns of it.
    pytest.mark.filterwarnings("ignore:The input of maxpool2d is not quantized"),
]

WIDTH = 32
LINEAR, CONVOLUTION, MATMUL = "qfuse.linear", "qfuse.convolution", "qfuse.matmul"


class Family(nn.Module):
    """A function of layers."""

    def __init__(self, forward: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._forward = forward

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        """Call the function with the layers first."""
        return self._forward(self.layers, *args)


def linear(out: int = WIDTH, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, out, bias=bias)


def convolution(out: int = 8, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(8, out, 3, padding=1, groups=groups)


def features(*lead: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*lead, WIDTH),)


def image() -> tuple[torch.Tensor, ...]:
    return (torch.randn(2, 8, 10, 10),)


def attention(m: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    """Attention written out, with three linears of one input."""
    heads = [m[name](x).view(2, 5, 4, 8).transpose(1, 2) for name in "qkv"]
    q, k, v = heads
    weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
    out: torch.Tensor = m["o"]((weights @ v).transpose(1, 2).reshape(2, 5, WIDTH))
    return out


@dataclass(frozen=True)
class Case:
    """A family.

    Attributes:
        model: Builds the model.
        inputs: Builds its inputs.
        ops: How many products of each kind run on kernels; those of one input are one.
        left: How many quantizes and dequantizes are left that no kernel needs.
        recipe: How the model is quantized.
    """

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    ops: dict[str, int]
    left: int = 0
    recipe: str = "w8a8-static"


def one(act: Callable[[torch.Tensor], torch.Tensor], *, image_: bool = False) -> Case:
    """A layer, an activation, a layer."""
    layer = convolution if image_ else linear
    return Case(
        lambda: Family(lambda m, x: m["b"](act(m["a"](x))), a=layer(), b=layer()),
        image if image_ else lambda: features(3, 7),
        {CONVOLUTION if image_ else LINEAR: 2},
    )


def before_another(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, left: int = 0
) -> Case:
    """What a linear and its input are combined to is the input of another one."""
    return Case(
        lambda: Family(lambda m, x: m["b"](combine(m["a"](x), x)), a=linear(), b=linear()),
        lambda: features(7),
        {LINEAR: 2},
        left,
    )


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda y: F.gelu(y, approximate="tanh"),
}

CASES: dict[str, Case] = {
    **{f"linear, {name}": one(act) for name, act in ACTIVATIONS.items()},
    **{f"convolution, {name}": one(act, image_=True) for name, act in ACTIVATIONS.items()},
    "linears without bias": Case(
        lambda: Family(lambda m, x: m["b"](m["a"](x)), a=linear(bias=False), b=linear(bias=False)),
        lambda: features(3, 7),
        {LINEAR: 2},
    ),
    "four axes": Case(
        lambda: Family(lambda m, x: m["a"](x), a=linear()), lambda: features(2, 3, 4), {LINEAR: 1}
    ),
    "sum of two linears": Case(
        lambda: Family(
            lambda m, x: m["c"](F.relu(m["a"](x) + m["b"](x))), a=linear(), b=linear(), c=linear()
        ),
        lambda: features(7),
        {LINEAR: 2},
    ),
    "sum with the input": before_another(lambda y, x: y + x),
    "product with the input": before_another(lambda y, x: y * x, left=2),
    "sum of two convolutions": Case(
        lambda: Family(
            lambda m, x: m["c"](F.relu(m["a"](x) + m["b"](x))),
            a=convolution(),
            b=convolution(),
            c=convolution(),
        ),
        image,
        {CONVOLUTION: 3},
    ),
    "residuals of one image": Case(
        lambda: Family(
            lambda m, x: m["c"]((y := F.relu(m["a"](x))) + m["b"](y)) + y,
            a=convolution(),
            b=convolution(),
            c=convolution(),
        ),
        image,
        {CONVOLUTION: 3},
    ),
    "batch norm": Case(
        lambda: Family(
            lambda m, x: m["b"](F.relu(m["n"](m["a"](x)))),
            a=convolution(),
            n=nn.BatchNorm2d(8),
            b=convolution(),
        ),
        image,
        {CONVOLUTION: 2},
    ),
    "depthwise": Case(
        lambda: Family(lambda m, x: m["b"](m["a"](x)), a=convolution(groups=8), b=convolution()),
        image,
        {CONVOLUTION: 2},
    ),
    "max pool, flatten": Case(
        lambda: Family(
            lambda m, x: m["l"](F.max_pool2d(F.relu(m["a"](x)), 5).flatten(1)),
            a=convolution(),
            l=linear(4),
        ),
        image,
        {CONVOLUTION: 1, LINEAR: 1},
    ),
    "average pool": Case(
        lambda: Family(
            lambda m, x: m["b"](F.avg_pool2d(m["a"](x), 2)), a=convolution(), b=convolution()
        ),
        image,
        {CONVOLUTION: 2},
        left=1,
    ),
    "cat": Case(
        lambda: Family(
            lambda m, x: m["c"](torch.cat([m["a"](x), m["b"](F.relu(x))], 1)),
            a=convolution(out=4),
            b=convolution(out=4),
            c=convolution(),
        ),
        image,
        {CONVOLUTION: 3},
    ),
    "one input, three linears": Case(
        lambda: Family(
            lambda m, x: m["a"](x) + m["b"](x) * m["c"](x), a=linear(), b=linear(), c=linear()
        ),
        lambda: features(7),
        {LINEAR: 1},
        left=4,
    ),
    "one linear, two readers": Case(
        lambda: Family(
            lambda m, x: m["b"](y := m["a"](x)) + m["c"](y), a=linear(), b=linear(), c=linear()
        ),
        lambda: features(7),
        {LINEAR: 2},
    ),
    "attention": Case(
        lambda: Family(attention, **{name: linear() for name in "qkvo"}),
        lambda: features(2, 5),
        {LINEAR: 2},
    ),
    "dynamic": Case(
        lambda: Family(lambda m, x: m["b"](F.relu(m["a"](x))), a=linear(), b=linear()),
        lambda: features(3, 7),
        {LINEAR: 2},
        recipe="pt2e-dynamic",
    ),
    "dynamic attention": Case(
        lambda: Family(attention, **{name: linear() for name in "qkvo"}),
        lambda: features(2, 5),
        {LINEAR: 2},
        recipe="pt2e-dynamic",
    ),
    "bfloat16": Case(
        lambda: Family(lambda m, x: m["b"](F.gelu(m["a"](x))), a=linear(), b=linear()),
        lambda: features(3, 7),
        {LINEAR: 2},
        recipe="w8a8-static-bf16",
    ),
    "bfloat16 convolutions": Case(
        lambda: Family(
            lambda m, x: m["b"](F.relu(m["a"](x) + x)), a=convolution(), b=convolution()
        ),
        image,
        {CONVOLUTION: 2},
        recipe="w8a8-static-bf16",
    ),
    "weights alone": Case(
        lambda: Family(lambda m, x: m["b"](F.silu(m["a"](x))), a=linear(), b=linear()),
        lambda: features(3, 7),
        {LINEAR: 2},
        recipe="w8a16",
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_family_of_pt2e(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    source = recipes.quantize(case.model().eval(), case.recipe, inputs).model
    fast = qfuse.compile(
        source,
        inputs,
        check="site",
        target=Target.for_testing(isa="avx512_vnni"),
        options={"backend": "eager", "prefer": "memory"},
    )
    report = fast.report
    products = (LINEAR, CONVOLUTION, MATMUL)
    assert Counter(e.place.op for e in report.fused if e.place.op in products) == case.ops
    assert not [e for e in report.expanded if e.place.op in products]
    assert report.rolled_back == ()
    assert sum(not e.needed for e in report.left) == case.left
    assert all(check.passed for check in report.checks)
    for seed in range(2):
        torch.manual_seed(seed)
        again = case.inputs()
        got, want = fast(*again), source(*again)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        power = (got - want).double().square().mean() / want.double().square().mean()
        assert power < FLIPPED_POWER
