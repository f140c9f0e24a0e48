"""The activations of epilogues: their errors, their extremes, and the same bits on every path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.support.cases.linear_kernel import ACTIVATION_ERROR, identity, linear

from qfuse.ir.ops.epilogue import ACTIVATIONS, Epilogue
from qfuse.kernels import KernelLibrary, instruction_set
from qfuse.lower.problems.epilogue_limits import KERNEL_ACTIVATIONS, PRELU

pytestmark = pytest.mark.numeric


def reference(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the meaning of an activation, named as in an epilogue, with arguments."""
    return lambda x: Epilogue.parse(f"act({name})").apply(x, [])


@pytest.mark.parametrize("name", sorted(ACTIVATION_ERROR))
def test_activations_are_as_accurate_as_float32_allows(isa: str, name: str) -> None:
    del isa
    x = torch.linspace(-20, 20, 64 * 4001).reshape(-1, 64)
    exact = reference(name)(x.double())

    y = identity(x).with_options(epilogue=f"add(0,1.0)|act({name})").run()

    epsilons, floor = ACTIVATION_ERROR[name]
    allowed = epsilons * torch.finfo(torch.float32).eps * exact.abs().clamp_min(floor)
    assert ((y.double() - exact).abs() <= allowed + torch.finfo(torch.float32).tiny).all()


def test_every_activation_that_is_lowered_to_a_kernel_is_there(library: KernelLibrary) -> None:
    del library
    case = linear((3, 8), 5)
    arguments = {
        "hardtanh": (0.0, 6.0),
        "leaky_relu": (0.01,),
        "elu": (0.7, 1.2, 0.9),
        "quick_gelu": (1.702,),
    }
    for name in sorted(KERNEL_ACTIVATIONS - {PRELU}):
        function, args = ACTIVATIONS[name], arguments.get(name, ())
        text = f"act({','.join((name, *map(repr, args)))})"

        y = case.with_options(epilogue=text).run()

        torch.testing.assert_close(y, function(case.expected(), *args))


@pytest.mark.parametrize("name", [*sorted(ACTIVATION_ERROR), "relu", "leaky_relu,0.5"])
def test_extremes(isa: str, name: str) -> None:
    del isa
    x = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 90.0, -90.0, 1e37, -1e37, torch.nan]])
    # In float64, since some of torch's own float32 versions overflow here.
    expected = reference(name)(x.double())

    y = identity(x).with_options(epilogue=f"add(0,1.0)|act({name})").run()

    assert torch.isnan(y[0, -1])
    torch.testing.assert_close(y[0, :-1], expected[0, :-1].float())


def test_paths_agree_on_every_activation(library: KernelLibrary) -> None:
    """Also where exponentials saturate, at zeros, subnormals, infinities and NaN."""
    wild = [0.0, -0.0, 1e-40, -1e-40, 88.0, 88.5, -87.0, -88.5, 104.0, -104.0, 3e38, -3e38]
    wild += [torch.inf, -torch.inf, torch.nan, 1.0, 0.35, -0.35, 20.0]
    x = torch.cat([torch.tensor(wild), torch.linspace(-120, 120, 4077)]).reshape(-1, 64)
    for name in (*ACTIVATION_ERROR, "elu,1.0,1.0,-1.0", "quick_gelu,-2.0"):
        results = []
        for path in library.instruction_sets:
            with instruction_set(path):
                results.append(identity(x).with_options(epilogue=f"add(0,1.0)|act({name})").run())

        assert all(torch.equal(r.view(torch.int32), results[0].view(torch.int32)) for r in results)


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("elu,0.5,2.0,1.0", -torch.inf, -1.0),
        ("elu,0.5,2.0,1.0", torch.inf, torch.inf),
        ("elu,1.0,1.0,-1.0", -88.0, 1.6516e38),
        ("elu,1.0,1.0,-1.0", -89.5, torch.inf),
        ("elu,1.0,1.0,1.0", -1e-20, -1e-20),
        ("mish", torch.inf, torch.inf),
        ("mish", 3e38, 3e38),
        ("mish", -3e38, 0.0),
        ("quick_gelu,1.702", torch.inf, torch.inf),
        ("quick_gelu,1.702", -3e38, 0.0),
    ],
)
def test_saturation(isa: str, name: str, x: float, expected: float) -> None:
    del isa
    y = identity(torch.full((1, 70), x)).with_options(epilogue=f"add(0,1.0)|act({name})").run()

    torch.testing.assert_close(y, torch.full((1, 70), expected), rtol=1e-3, atol=1e-30)
