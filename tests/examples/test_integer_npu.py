"""The example backend: it passes the kit, runs models of the zoo, and saves programs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.architecture.source import PACKAGE, ROOT
from tests.support.cases.quantized_convolution import ConvolutionCase
from tests.support.graphs.tiny_models import tiny
from torch.fx import Interpreter, Node

import qfuse
from qfuse.backends import chosen_backends
from qfuse.ir.graph.stage_graph import CLAIM_META, LoweredGraph
from qfuse.ir.signature.caller import Caller
from qfuse.targets import Target
from qfuse.testing import BackendCase, GraphBuilder, check_backend, per_tensor
from qfuse.testing.quant import QuantizedLinear
from qfuse.zoo import recipes

EXAMPLE = ROOT / "examples" / "integer_npu"


@pytest.fixture(scope="module", name="npu")
def npu_package() -> Iterator[ModuleType]:
    """The package, from its source folder."""
    sys.path.insert(0, str(EXAMPLE / "src"))
    yield importlib.import_module("integer_npu")
    sys.path.remove(str(EXAMPLE / "src"))


@pytest.mark.slow
@pytest.mark.numeric
def test_it_passes_the_kit(npu: ModuleType) -> None:
    coverage = check_backend(npu.backend)

    assert coverage.claimed.keys() == {
        "qfuse.linear",
        "qfuse.convolution",
        "qfuse.activation",
        "qfuse.requantize",
        "qfuse.elementwise",
        "qfuse.average_pool",
        "aten.max_pool2d",
    }
    text = str(coverage)
    assert "its weight: scales vary along the axes 0, 1" in text
    assert "its result is not quantized" in text
    assert "its windows have several sizes" in text
    assert "its second operand is not quantized" in text


def clamped(b: GraphBuilder) -> Node:
    return b.call(torch.ops.aten.clamp.default, b.arg("x", torch.int8, "n", 8), -5, 90)


def convolved(b: GraphBuilder, case: ConvolutionCase) -> Node:
    """Add a convolution with a quantized result."""
    y = case.add(b, b.arg("x", torch.float32, *case.shape))
    return QuantizedLinear(b, 4, 8).stored(y, per_tensor(len(case.shape)), "out")[0]


def empty_images(b: GraphBuilder) -> Node:
    return convolved(b, ConvolutionCase((0, 6, 9, 8)))


def one_image(b: GraphBuilder) -> Node:
    return convolved(b, ConvolutionCase((6, 9, 8), kernel=(3, 2), stride=2))


def with_a_weight_zero_point(b: GraphBuilder) -> Node:
    return convolved(b, ConvolutionCase(weight=torch.uint8, weight_zero=131))


@pytest.mark.numeric
@pytest.mark.parametrize("build", [clamped, empty_images, one_image, with_a_weight_zero_point])
def test_it_is_right_where_the_battery_has_no_graph(npu: ModuleType, build: Any) -> None:
    sizes = ({"n": 1}, {"n": 9}) if build is clamped else ({},)
    coverage = check_backend(npu.backend, [BackendCase(build.__name__, build, sizes)])

    assert coverage.claimed.total() == 1


@pytest.mark.numeric
@pytest.mark.usefixtures("npu")
def test_fixed_point_rounds_half_away_from_zero() -> None:
    fixed = importlib.import_module("integer_npu.fixed_point")
    multiplier, shift = fixed.fixed_point([0.5, -0.5, 0.3, 1e-30, 1.0])
    values = np.array([5, 5, 10, 2**31 - 1, -(2**31)], np.int64)

    assert fixed.rescale(values, multiplier, shift).tolist() == [3, -3, 3, 0, -(2**31)]
    assert fixed.fixed_point([float("nan")]) is None
    assert fixed.fixed_point([2.0**40]) is None
    some = torch.randint(-(2**31), 2**31, (4096,)).numpy()
    for factor in (0.7, 0.00123, 0.999999, 3.3e-7):
        m, s = fixed.fixed_point([factor])
        apart = fixed.rescale(some, m, s) - some * factor
        assert np.abs(apart).max() <= 0.5 + 2.0**-31 * np.abs(some * factor).max()


def compiled(npu: ModuleType, name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Quantize a model of the zoo statically, and compile it for the accelerator."""
    model = tiny(name)
    quantized = recipes.quantize(model.module, "w8a8-static", model.args, model.kwargs).model
    fast = qfuse.compile(
        quantized,
        model.args,
        model.kwargs,
        target=Target.for_testing(),
        options={"backend": npu.backend},
    )
    return fast, model.args, model.kwargs


class StepByStep(Interpreter):
    """Runs the reference, and each claimed node on the accelerator with the same operands."""

    def __init__(self, lowered: LoweredGraph, npu: ModuleType) -> None:
        super().__init__(lowered.module)
        self.npu = npu
        self.apart: list[int] = []

    def run_node(self, n: Node) -> Any:
        """Compare, and go on with the value of the reference."""
        value = super().run_node(n)
        if n.meta.get(CLAIM_META) and "getitem" not in str(n.target):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            own = self.npu.backend.implement(n)(*args, **kwargs)
            pairs = zip(value, own, strict=True) if isinstance(value, list) else [(value, own)]
            for one, other in pairs:
                assert one.dtype == other.dtype
                assert one.stride() == other.stride()
                self.apart.append(int((one.int() - other.int()).abs().max()))
        return value


@pytest.mark.slow
@pytest.mark.zoo
@pytest.mark.numeric
@pytest.mark.parametrize(
    ("name", "least"), [pytest.param("mobilenet", 50, marks=pytest.mark.thorough), ("bert", 1)]
)
def test_models_of_the_zoo_run_within_one_step(npu: ModuleType, name: str, least: int) -> None:
    fast, args, kwargs = compiled(npu, name)
    report = fast.report

    assert fast.backend == "integer-npu"
    assert report.kernels["integer-npu"] >= least
    assert [claim.backend for claim in report.facts.claims] == ["integer-npu"]
    lowered = fast.plan.lowered
    caller = Caller(lowered.signature)
    inputs = caller.check(caller.bind(args, kwargs))
    steps = StepByStep(lowered, npu)
    with torch.no_grad():
        steps.run(*inputs)
    assert len(steps.apart) == report.kernels["integer-npu"]
    assert max(steps.apart) <= 1


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.zoo
def test_a_saved_program_runs_without_the_model(npu: ModuleType, tmp_path: Path) -> None:
    fast, args, kwargs = compiled(npu, "mobilenet")
    caller = Caller(fast.signature)
    inputs = caller.check(caller.bind(args, kwargs))
    expected = fast.runner.run(list(inputs))
    file = tmp_path / "mobilenet.npu"
    npu.save(fast.runner, file)
    torch.save({"inputs": inputs, "expected": expected}, tmp_path / "values.pt")
    script = (
        "import sys, torch, integer_npu\n"
        "values = torch.load(sys.argv[2])\n"
        "got = integer_npu.load(sys.argv[1]).run(values['inputs'])\n"
        "assert all(map(torch.equal, got, values['expected'])), 'other values'\n"
        "assert not any(m.startswith('transformers') for m in sys.modules)\n"
        "print('same')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file), str(tmp_path / "values.pt")],
        env={"PYTHONPATH": f"{PACKAGE.parent}:{EXAMPLE / 'src'}"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip

    assert done.stdout.strip() == "same", done.stderr


def test_a_program_checks_its_inputs(npu: ModuleType) -> None:
    b = GraphBuilder()
    block = QuantizedLinear(b, 4, 8)
    x = block.quantized(b.arg("x", torch.float32, "n", 8), per_tensor(2))
    lowered = b.done(b.call(torch.ops.aten.neg.default, x))
    assert isinstance(lowered.graph.output_node(), Node)
    runner = npu.backend.compile(LoweredGraph(lowered.module, lowered.signature, lowered.log))

    assert runner.run([torch.ones(3, 8)])[0].shape == (3, 8)
    with pytest.raises(qfuse.BackendError, match=r"the input x is torch.float32"):
        runner.run([torch.ones(3, 9)])
    with pytest.raises(qfuse.BackendError, match=r"the input x is torch.float64"):
        runner.run([torch.ones(3, 8).double()])


def test_what_does_not_become_a_program_cannot_be_saved(npu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(qfuse.BackendError, match="there is no program to save"):
        npu.save(object(), tmp_path / "x")


def test_it_is_chosen_as_an_object(npu: ModuleType) -> None:
    assert chosen_backends(npu.backend) == (npu.backend,)
