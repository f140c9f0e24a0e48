from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.sources.dialects import Source, assert_same_bits, fired, ops_of, run

from qfuse.ir.events import MissCode
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.normalize.aten.views.drop_copy import DropCopy
from qfuse.normalize.importers.dialect import Dialect
from qfuse.rewrite.rule import Miss

aten = torch.ops.aten
COPIES_GO = Dialect("copies", lambda: [DropCopy()])
COPIES = [
    (aten._to_copy.default, {"dtype": torch.float32}),
    (aten._to_copy.default, {}),
    (aten.clone.default, {}),
    (aten.clone.default, {"memory_format": torch.contiguous_format}),
    (aten.detach.default, {}),
    (aten.lift_fresh_copy.default, {}),
]


def test_golden_copies_go() -> None:
    source = Source()
    x = source.b.arg("x", torch.float32, "B", 8)
    y = source.b.call(aten._to_copy.default, x, dtype=torch.float32)
    y = source.b.call(aten.relu.default, y)
    y = source.b.call(aten.clone.default, y)
    program = normalize(source.done(y), dialects=(COPIES_GO,))

    assert fired(program) == [DropCopy.name] * 2
    assert_expected_inline(
        to_text(program.graph),
        """\
%x: float32[s0, 8]
%0 = aten.relu(%x): float32[s0, 8]
return (%0)""",
    )


@pytest.mark.numeric
def test_a_cast_to_the_type_of_another_tensor_goes_if_it_is_the_same() -> None:
    source = Source()
    x, other = source.arg(torch.randn(3, 8)), source.arg(torch.randn(2))
    narrow = source.b.call(aten.type_as.default, x, source.arg(torch.randn(2).bfloat16()))
    y = source.b.call(aten.neg.default, source.b.call(aten.type_as.default, x, other))
    program = assert_same_bits(source, y, narrow, dialects=(COPIES_GO,))

    assert ops_of(program, "aten") == ["type_as", "neg"]


@pytest.mark.numeric
@pytest.mark.parametrize(("op", "kwargs"), COPIES)
def test_values_stay(op: torch._ops.OpOverload, kwargs: dict[str, object]) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    y = source.b.call(aten.neg.default, source.b.call(op, x, **kwargs))  # type: ignore[arg-type]
    program = assert_same_bits(source, y, dialects=(COPIES_GO,))

    assert ops_of(program, "aten") == ["neg"]


@pytest.mark.numeric
@pytest.mark.parametrize(("op", "kwargs"), COPIES)
@pytest.mark.parametrize("view", [None, aten.view.default, aten.reshape.default])
def test_refuses_what_the_caller_could_tell_from_an_input(
    op: torch._ops.OpOverload, kwargs: dict[str, object], view: torch._ops.OpOverload | None
) -> None:
    source = Source()
    x = source.arg(torch.randn(3, 8))
    y = source.b.call(op, x, **kwargs)  # type: ignore[arg-type]
    if view is not None:
        y = source.b.call(view, y, [24])
    program = assert_same_bits(source, y, dialects=(COPIES_GO,))

    assert fired(program) == []
    if op is not aten.detach.default:
        assert not shares_memory(run(program, source.inputs)[0], source.inputs[0])


def test_refuses_what_the_caller_could_tell_from_a_constant() -> None:
    source = Source()
    w = source.b.const("w", torch.randn(3, 8))
    y = source.b.call(aten.lift_fresh_copy.default, source.b.call(aten.t.default, w))
    program = assert_same_bits(source, y, dialects=(COPIES_GO,))

    assert fired(program) == []


@pytest.mark.numeric
def test_refuses_what_the_caller_could_tell_from_another_output() -> None:
    source = Source()
    y = source.b.call(aten.neg.default, source.arg(torch.randn(3, 8)))
    copy = source.b.call(aten.clone.default, y)
    row = source.b.call(aten.select.int, y, 0, 1)
    program = assert_same_bits(source, copy, row, dialects=(COPIES_GO,))

    assert fired(program) == []
    assert not shares_memory(*run(program, source.inputs))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dtype": torch.bfloat16},
        {"memory_format": torch.channels_last},
        {"pin_memory": True},
    ],
)
def test_refuses_a_copy_that_changes_something(kwargs: dict[str, object]) -> None:
    source = Source()
    x = source.arg(torch.randn(2, 3, 4, 5))
    copy = source.b.call(aten._to_copy.default, x, dtype=torch.float32)
    copy.kwargs = kwargs  # type: ignore[assignment]
    if "pin_memory" not in kwargs:
        copy.meta["val"] = aten._to_copy.default(copy.args[0].meta["val"], **kwargs)  # type: ignore[union-attr]
    program = normalize(source.done(source.b.call(aten.neg.default, copy)), dialects=(COPIES_GO,))

    assert fired(program) == []


@pytest.mark.numeric
def test_refuses_a_copy_that_makes_a_tensor_contiguous() -> None:
    source = Source()
    x = source.b.call(aten.t.default, source.arg(torch.randn(3, 8)))
    copy = source.b.call(aten.clone.default, x, memory_format=torch.contiguous_format)
    y = source.b.call(aten.view.default, copy, [24])

    miss = DropCopy().match(copy)
    assert isinstance(miss, Miss)
    assert (miss.code, miss.at) == (MissCode.SHAPE, copy)
    program = assert_same_bits(source, y, dialects=(COPIES_GO,))
    assert fired(program) == []
    assert ops_of(program, "aten") == ["t", "clone", "view"]


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors show one storage."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
