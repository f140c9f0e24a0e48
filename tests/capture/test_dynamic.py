"""Sizes that vary: names, ranges, relations, and what is refused when they do not hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.graphs.capture_models import Stack, assert_same_run, captured, module
from torch import nn
from torch.export import Dim

from qfuse.capture import capture
from qfuse.ir.errors import CaptureError, InputError
from qfuse.ir.events import Noted
from qfuse.ir.signature.run import run_functional

pytestmark = pytest.mark.numeric


def test_batch_and_length_with_names() -> None:
    def forward(self: Any, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        del self
        return (ids * mask).sum(-1), ids.shape[0] * ids.shape[1]

    model = module(forward)
    dims = {0: Dim("batch", min=1, max=16), 1: Dim("length", min=1, max=512)}
    example = torch.ones(2, 7, dtype=torch.int64)
    program = captured(model, ids=example, mask=example, dynamic_shapes={"ids": dims, "mask": dims})

    ids, mask = program.signature.inputs
    assert ids.shape == mask.shape
    labels = {s.label: (s.low, s.hint, s.high) for s in program.signature.symbols.values()}
    assert labels == {"batch": (1, 2, 16), "length": (1, 7, 512)}
    for shape in ((1, 1), (3, 1), (1, 9), (16, 512)):
        x = torch.randint(0, 9, shape)
        assert_same_run(program, model, ids=x, mask=x)
    assert program.signature.outputs[1].size is not None
    with pytest.raises(InputError) as error:
        run_functional(program, ids=example, mask=torch.ones(2, 8, dtype=torch.int64))
    assert error.value.what == (
        "mask: expected int64[batch, length] with 1 <= batch <= 16 and 1 <= length <= 512, "
        "got int64[2, 8]; length is 7 in an earlier input"
    )
    x = torch.ones(2, 513, dtype=torch.int64)
    with pytest.raises(InputError, match=r"ids: expected .* got 513 in axis 1"):
        run_functional(program, ids=x, mask=x)


@pytest.mark.parametrize("shapes", [({0: Dim.AUTO},), [{0: Dim.DYNAMIC}], {"x": (Dim.AUTO, None)}])
def test_automatic_sizes_in_every_spelling(shapes: Any) -> None:
    model = Stack().eval()
    program = captured(model, torch.randn(4, 32), dynamic_shapes=shapes)

    assert_same_run(program, model, torch.randn(11, 32))
    (symbol,) = program.signature.symbols.values()
    assert (symbol.low, symbol.hint, symbol.high) == (2, 4, None)
    with pytest.raises(InputError, match=r"x: expected float32\[s\d+, 32\] with s\d+ >= 2, got 1"):
        run_functional(program, torch.randn(1, 32))


def test_derived_sizes() -> None:
    model = module(lambda _self, x, y: torch.cat([x, x]) + y)
    half = Dim("half", min=2, max=8)
    program = captured(
        model,
        torch.randn(3, 2),
        torch.randn(6, 2),
        dynamic_shapes={"x": {0: half}, "y": {0: 2 * half}},
    )

    assert_same_run(program, model, torch.randn(5, 2), torch.randn(10, 2))
    with pytest.raises(InputError, match=r"the sizes break 'y_0 == 2\*s\d+'"):
        run_functional(program, torch.randn(5, 2), torch.randn(9, 2))


def test_a_size_that_is_derived_from_one_that_no_axis_has() -> None:
    model = module(lambda _self, x, y: x.view(-1, 4).sum(0) + y.view(-1, 4).sum(0))
    quarter = Dim("quarter", min=2, max=8)
    program = captured(
        model,
        torch.randn(12),
        torch.randn(16),
        dynamic_shapes={"x": {0: 4 * quarter}, "y": {0: 4 * quarter + 4}},
    )

    (x, y) = program.signature.inputs
    symbols = program.signature.symbols
    assert symbols[str(x.shape[0])].multiple_of == 4
    assert "y_0 == 4 + 4 * (x_0 // 4)" in program.signature.relations
    assert symbols[str(y.shape[0])].multiple_of == 1
    assert_same_run(program, model, torch.randn(20), torch.randn(24))
    with pytest.raises(InputError, match="multiple of 4"):
        run_functional(program, torch.randn(18), torch.randn(22))
    with pytest.raises(InputError, match="the sizes break"):
        run_functional(program, torch.randn(20), torch.randn(20))


def test_conditions_that_the_model_decided_on_are_guarded() -> None:
    model = module(lambda _self, x: x + 1 if x.shape[0] % 2 == 0 else x - 1)
    program = captured(model, torch.randn(4), dynamic_shapes={"x": {0: Dim.AUTO}})

    assert_same_run(program, model, torch.randn(6))
    with pytest.raises(InputError, match=r"the sizes break 's\d+ % 2 == 0'.*axis 0 of x\) is 5"):
        run_functional(program, torch.randn(5))
    # Passing sizes are remembered, which must not let others through.
    assert_same_run(program, model, torch.randn(6))


def test_sizes_inside_containers() -> None:
    model = module(lambda _self, tree: tree["a"][0] + tree["b"][1:])
    shapes = {"tree": {"a": [{0: Dim.AUTO}], "b": {0: Dim.AUTO}}}
    program = captured(model, {"a": [torch.randn(4)], "b": torch.randn(5)}, dynamic_shapes=shapes)

    assert_same_run(program, model, {"b": torch.randn(8), "a": [torch.randn(7)]})
    with pytest.raises(InputError, match=r"axis 0 of tree\['a'\]\[0\]\) is 7"):
        run_functional(program, {"b": torch.randn(7), "a": [torch.randn(7)]})


def notes(model: Any, x: torch.Tensor, dim: Any) -> list[str]:
    program = captured(model, x, dynamic_shapes={"x": {0: dim}})
    events = program.log.of(Noted)
    assert all(event.warn for event in events)
    return [event.text for event in events]


def test_an_axis_that_stays_fixed_is_a_warning() -> None:
    (text,) = notes(module(lambda _self, x: x * 2), torch.randn(1, 3), Dim.AUTO)
    assert text.startswith("axis 0 of x was requested to be dynamic but stays 1: the example has 1")
    (text,) = notes(module(lambda _self, x: x + torch.ones(4, 1)), torch.randn(4, 3), Dim.AUTO)
    assert text.startswith(
        "axis 0 of x was requested to be dynamic but stays 4: the model fixes it"
    )
    assert notes(module(lambda _self, x: x * 2), torch.randn(4, 3), Dim.AUTO) == []
    assert notes(module(lambda _self, x: x * 2), torch.randn(1, 3), Dim.STATIC) == []


@pytest.mark.parametrize(
    ("example", "shapes", "what", "fix"),
    [
        (1, {"x": {0: Dim("b")}}, "specialized it to be a constant (1)", "at least 2 long"),
        (1, {"x": {0: Dim.DYNAMIC}}, "hint of 1", "at least 2 long"),
        (
            4,
            {"z": {0: Dim("b")}},
            "must be the arg names ['x']",
            "the keys of dynamic_shapes: 'x'",
        ),
        (4, {"x": {0: Dim("b")}}, "satisfy the generated guard", "declare b = Dim('b', min=3)"),
    ],
)
def test_sizes_that_do_not_fit(example: int, shapes: Any, what: str, fix: str) -> None:
    model = module(lambda _self, x: x + 1 if x.shape[0] > 2 else x)
    with pytest.raises(CaptureError) as error:
        capture(model, (torch.randn(example),), dynamic_shapes=shapes)

    assert error.value.what.startswith("the dynamic sizes do not fit the model: ")
    assert what in error.value.what
    assert "TORCH_LOGS" not in str(error.value)
    assert error.value.fix is not None
    assert fix in error.value.fix
    assert isinstance(error.value.__cause__, Exception)


def test_a_size_that_the_model_fixes_is_to_be_left_out() -> None:
    model = module(lambda self, x: self.fc(x), fc=torch.nn.Linear(4, 3))
    shapes = {"x": {0: Dim("b"), 1: Dim("n")}}
    with pytest.raises(CaptureError, match="leave n out of dynamic_shapes") as error:
        capture(model, (torch.randn(5, 4),), dynamic_shapes=shapes)
    assert "works for 4 only" in str(error.value.fix)
    assert "mark_dynamic" not in str(error.value)


def test_names_that_must_be_one() -> None:
    model = module(lambda _self, x, y: x + y)
    shapes = {"x": {0: Dim("b")}, "y": {0: Dim("c")}}
    with pytest.raises(CaptureError, match="declare c = b"):
        capture(model, (torch.randn(4), torch.randn(4)), dynamic_shapes=shapes)


def test_a_number_cannot_be_dynamic() -> None:
    model = module(lambda _self, x, k: x * k)
    with pytest.raises(CaptureError, match="k is a SymInt: only sizes of tensors may vary"):
        capture(model, (torch.randn(4), 3), dynamic_shapes={"x": None, "k": Dim.DYNAMIC})


@pytest.mark.parametrize(
    ("entry", "given"),
    [
        ({5: Dim.AUTO}, "the axis 5"),
        ({-3: Dim.AUTO}, "the axis -3"),
        ({"0": Dim.AUTO}, "the axis '0'"),
        ((Dim.AUTO,), "a list of length 1"),
    ],
)
def test_an_axis_that_an_input_does_not_have(entry: Any, given: str) -> None:
    class Nested(nn.Module):
        def forward(self, tree: dict[str, torch.Tensor]) -> torch.Tensor:
            return tree["a"] * 2

    with pytest.raises(CaptureError) as error:
        capture(Nested(), ({"a": torch.ones(4, 8)},), dynamic_shapes={"tree": {"a": entry}})
    what = f"dynamic_shapes has {given} for tree['a'], which has rank 2: its shape is [4, 8]"
    assert error.value.what == what
    assert "axes of tree['a'] by number (0, 1)" in str(error.value.fix)


def test_a_scalar_has_no_axis() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        del self
        return x * 2

    with pytest.raises(CaptureError, match="the axis 0 for x, which has rank 0") as error:
        capture(module(forward), (torch.tensor(2.0),), dynamic_shapes={"x": {0: Dim.AUTO}})
    assert "leave x out" in str(error.value.fix)


def test_an_axis_counted_from_the_end_has_its_name() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        del self
        return x * 2

    model, dims = module(forward), {-1: Dim("length", min=2, max=9)}
    program = captured(model, torch.ones(4, 8), dynamic_shapes={"x": dims})
    assert [s.label for s in program.signature.symbols.values()] == ["length"]
    assert_same_run(program, model, torch.ones(4, 3))


@pytest.mark.parametrize("shapes", [({0: Dim.AUTO}, None), {"x": {"y": None}}])
def test_containers_that_differ_from_those_of_the_inputs(shapes: Any) -> None:
    with pytest.raises(CaptureError) as error:
        capture(Stack().eval(), (torch.ones(4, 32),), dynamic_shapes=shapes)
    assert "dynamic_shapes" in str(error.value.fix) or "by number" in str(error.value.fix)
