"""``free_source=True``: what the source model keeps, who refuses it, and what memory it takes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from torch import nn

import qfuse

EAGER = {"backend": "eager"}
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class _Int8Linear(nn.Module):
    """A linear with an int8 weight, quantized by hand."""

    weight: torch.Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (width, width)).to(torch.int8))
        self.scale = nn.Parameter(torch.full((width, 1), 0.01), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale)


class _Counting(nn.Module):
    """Counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Int8Linear()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        counted: torch.Tensor = self.inner(x)
        return counted


def test_the_model_keeps_no_weight_and_the_compiled_one_works() -> None:
    model = nn.Sequential(_Int8Linear(), nn.ReLU(), nn.Linear(8, 3)).eval()
    expected = qfuse.compile(model, (X,), options=EAGER)(X)
    held = [weakref.ref(value) for value in (*model.parameters(), *model.buffers())]
    fast = qfuse.compile(model, (X,), options=EAGER, free_source=True)
    assert torch.equal(fast(X), expected)
    assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))
    gc.collect()
    assert not any(ref() is not None for ref in held)
    assert any("gave up its 4 parameters" in str(event) for event in fast.report.events)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        model(X)


def test_without_it_the_model_is_untouched() -> None:
    model = _Int8Linear().eval()
    before = model(X)
    qfuse.compile(model, (X,), options=EAGER)
    assert torch.equal(model(X), before)


def test_a_weight_of_two_models_stays_in_the_other_one() -> None:
    first, second = _Int8Linear().eval(), _Int8Linear().eval()
    second.weight = first.weight
    expected = second(X)
    qfuse.compile(first, (X,), options=EAGER, free_source=True)
    assert first.weight.is_meta
    assert torch.equal(second(X), expected)


def test_tied_weights_are_given_up_in_all_places() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model[1].weight = model[0].weight
    held = weakref.ref(model[0].weight)
    fast = qfuse.compile(model, (X,), options=EAGER, free_source=True)
    gc.collect()
    assert held() is None
    assert fast(X).shape == (4, 8)


def test_state_that_the_compiled_model_writes_stays() -> None:
    model = _Counting().eval()
    fast = qfuse.compile(model, (X,), options=EAGER, free_source=True)
    fast(X)
    fast(X)
    assert model.calls.item() == 2
    assert model.inner.weight.is_meta


def test_a_failed_plan_takes_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    expected = model(X)
    with pytest.raises(qfuse.QfuseError):
        qfuse.compile(model, (X[:, :3],), options=EAGER, free_source=True)
    assert torch.equal(model(X), expected)


def test_a_program_is_refused() -> None:
    program = torch.export.export(_Int8Linear().eval(), (X,))
    with pytest.raises(qfuse.OptionsError, match="ExportedProgram is not a module"):
        qfuse.compile(program, options={**EAGER, "free_source": True})
    with pytest.raises(qfuse.OptionsError, match="ExportedProgram is not a module"):
        qfuse.optimize(program, options={"free_source": True})


def test_torch_compile_refuses_it() -> None:
    compiled = torch.compile(_Int8Linear(), backend="qfuse", options={"free_source": True})
    with pytest.raises(Exception, match=r"torch\.compile holds the weights"):
        compiled(X)


def test_it_is_a_bool() -> None:
    with pytest.raises(qfuse.OptionsError, match="'free_source' must be a bool"):
        qfuse.Options.of({"free_source": 1})


_MEASURED = """
    import gc, sys
    import torch
    from torch import nn
    import qfuse

    def bytes_of(key):
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))

    class Int8Linear(nn.Module):
        def __init__(self, k, n):
            super().__init__()
            self.register_buffer("weight", torch.randint(-127, 128, (n, k), dtype=torch.int8))
            self.register_buffer("scale", torch.full((n, 1), 0.01))

        def forward(self, x):
            return nn.functional.linear(x, self.weight.float() * self.scale)

    class Block(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.gate, self.up = Int8Linear(k, 4 * k), Int8Linear(k, 4 * k)
            self.down = Int8Linear(4 * k, k)

        def forward(self, x):
            return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))

    def compiled(k, blocks, free):
        model = nn.Sequential(*(Block(k) for _ in range(blocks))).eval()
        x = torch.randn(2, k)
        open("/proc/self/clear_refs", "w").write("5")
        options = {"backend": "eager", "prefer": "memory", "cache": False}
        fast = qfuse.compile(model, (x,), options=options, free_source=free)
        return model, fast

    free = sys.argv[1] == "free"
    compiled(32, 1, free)
    gc.collect()
    before = bytes_of("VmRSS")
    model, fast = compiled(1024, 20, free)
    peak = bytes_of("VmHWM") - before
    gc.collect()
    print(peak, bytes_of("VmRSS") - before, fast.report.facts.constant_bytes)
"""


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize("free", [False, True])
def test_the_peak_is_at_most_one_and_a_half_of_both_forms_of_the_weights(free: bool) -> None:
    code = textwrap.dedent(_MEASURED)
    # Memory that is free counts as such: glibc keeps small mappings for later otherwise.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    given = [sys.executable, "-c", code, "free" if free else "keep"]
    done = subprocess.run(given, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, after, packed = map(int, done.stdout.split()[-3:])
    source = 20 * 12 * 1024 * 1024
    assert packed >= source
    assert peak <= 1.5 * (source + packed)
    # The compiled model, and in the other case the source.
    assert after <= 1.2 * (packed if free else source + packed)
