"""Embedding bags, and other lookups, on quantized tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from tests.support.cases.propagate import priced
from tests.support.sources.library import Model
from torch.nn import functional as F

import qfuse
from qfuse.capture import capture
from qfuse.ir.events import MissCode, Missed
from qfuse.ir.graph.text import to_text
from qfuse.normalize import normalize
from qfuse.optimize.propagate.sink_below_bag_lookup import SinkBelowBagLookup
from qfuse.rewrite.driver import apply_rules
from qfuse.targets import Target

ROWS, WIDTH = 512, 24
NAME = SinkBelowBagLookup.name


def table(kind: str, dtype: torch.dtype = torch.int8) -> dict[str, torch.Tensor]:
    if dtype.is_floating_point:
        values = torch.randn(ROWS, WIDTH).to(dtype)
    else:
        low, high = (-8, 8) if kind == "four" else (-128, 128)
        values = torch.randint(low, high, (ROWS, WIDTH)).to(dtype)
    shape = {"tensor": (1, 1), "row": (ROWS, 1), "four": (ROWS, 1), "group": (ROWS, 3, 1)}[kind]
    return {"q": values, "scale": torch.rand(shape) * 0.1 + 0.01}


def floats(s: Any) -> torch.Tensor:
    if s.scale.ndim == 3:
        grouped: torch.Tensor = s.q.float().view(ROWS, 3, WIDTH // 3) * s.scale
        return grouped.view(ROWS, WIDTH)
    whole: torch.Tensor = s.q.float() * s.scale
    return whole


def compiled(source: Model, *args: torch.Tensor) -> qfuse.CompiledModel:
    done = qfuse.compile(
        source.eval(),
        args,
        check="site",
        options={"backend": "eager"},
        target=Target.for_testing(isa="avx512_vnni"),
    )
    assert not done.report.rolled_back
    for new, old in zip(_many(done(*args)), _many(source(*args)), strict=True):
        torch.testing.assert_close(new, old)
    return done


def _many(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def stays_quantized(done: qfuse.CompiledModel) -> bool:
    """Whether no constant is a float table."""
    held = [b for b in done.plan.lowered.module.buffers() if b.shape == (ROWS, WIDTH)]
    return [b.dtype.itemsize for b in held] == [1]


def bag(**options: Any) -> Any:
    return lambda s, i, o: F.embedding_bag(i, floats(s), o, **options)


INDICES = torch.randint(0, ROWS, (40,))
OFFSETS = torch.tensor([0, 3, 3, 9, 30])


def test_golden() -> None:
    source = Model(bag(padding_idx=5), **table("row"))
    program = normalize(capture(source, (INDICES, OFFSETS)))
    assert apply_rules(program, [SinkBelowBagLookup()], priced()).fired == {NAME: 1}
    assert_expected_inline(
        to_text(program.graph),
        """\
%args_0: int64[40]
%args_1: int64[5]
const %q: int8[512, 24]
const %scale: float32[512, 1]
%0 = aten.arange(40, dtype=int64, device=device(type='cpu')): int64[40]
const %padding_row: int64[1]
%1 = aten.cat((%padding_row, %args_0)): int64[41]
%2 = aten.eq.Scalar(%args_0, 5): bool[40]
%3 = aten.add.Tensor(%0, 1): int64[40]
%4 = aten.where.self(%2, %padding_row, %3): int64[40]
%5 = aten.embedding(%scale, %1): float32[41, 1]
%6 = aten.embedding(%q, %1): int8[41, 24]
%7 = qfuse.dequantize(%6, %5, None, 'int8[-128,127] 1x* float32 float32:reciprocal:round-zp int'): float32[41, 24]
%8 = aten.embedding_bag.padding_idx(%7, %4, %args_1, False, 1, False, None, False, 0): (float32[5, 24], int64[40], int64[5], int64[5])
%9 = getitem(%8, 0): float32[5, 24]
return (%9)""",
    )


@pytest.mark.numeric
@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["tensor", "row", "group", "four"])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 5, -3])
def test_bags(kind: str, mode: str, padding: int | None) -> None:
    source = Model(bag(mode=mode, padding_idx=padding), **table(kind))
    indices = INDICES.clone()
    indices[::4] = 5
    indices[1::7] = ROWS - 3
    done = compiled(source, indices, OFFSETS)
    assert done.report.fired[NAME] == 1
    assert stays_quantized(done)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8])
def test_bags_of_other_types(dtype: torch.dtype) -> None:
    done = compiled(Model(bag(), **table("row", dtype)), INDICES, OFFSETS)
    assert done.report.fired[NAME] == 1
    assert stays_quantized(done)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [None, 5])
def test_weights_last_offset_and_types_of_indices(
    index_type: torch.dtype, padding: int | None
) -> None:
    def forward(s: Any, i: torch.Tensor, o: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(
            i,
            floats(s),
            o,
            mode="sum",
            per_sample_weights=w,
            include_last_offset=True,
            padding_idx=padding,
        )

    offsets = torch.tensor([0, 4, 4, 40]).to(index_type)
    args = INDICES.to(index_type), offsets, torch.randn(40)
    done = compiled(Model(forward, **table("row")), *args)
    assert done.report.fired[NAME] == 1
    assert stays_quantized(done)


@pytest.mark.parametrize("padding", [None, 5])
def test_empty_bags(padding: int | None) -> None:
    source = Model(bag(padding_idx=padding), **table("row"))
    done = compiled(source, INDICES[:0], torch.tensor([0, 0]))
    assert done.report.fired[NAME] == 1


@pytest.mark.parametrize("options", [{}, {"padding_idx": 5}], ids=str)
def test_dynamic_numbers_of_indices(options: dict[str, Any]) -> None:
    source = Model(bag(**options), **table("row"))
    count = torch.export.Dim("count", min=2, max=200)
    done = qfuse.compile(
        source.eval(),
        (INDICES, OFFSETS),
        dynamic_shapes=(({0: count}, None),),
        options={"backend": "eager"},
        target=Target.for_testing(),
    )
    assert done.report.fired[NAME] == 1
    assert done.report.rolled_back == ()
    other = torch.randint(0, ROWS, (77,))
    torch.testing.assert_close(done(other, OFFSETS), source(other, OFFSETS))


def miss(source: Model, *args: torch.Tensor) -> Missed:
    program = normalize(capture(source.eval(), args))
    assert not apply_rules(program, [SinkBelowBagLookup()], priced()).fired
    (found,) = (m for m in program.log.of(Missed) if m.rule == NAME)
    return found


def test_refuses_more_rows_than_the_table_has() -> None:
    many = torch.randint(0, ROWS, (5000,))
    assert miss(Model(bag(), **table("row")), many, OFFSETS).code is MissCode.PROFIT


def test_refuses_other_results() -> None:
    def forward(s: Any, i: torch.Tensor, o: torch.Tensor) -> Any:
        found = torch.ops.aten._embedding_bag.default(floats(s), i, o)
        return found[0], found[1]

    found = miss(Model(forward, **table("row")), INDICES, OFFSETS)
    assert found.code is MissCode.SHARED
    assert found.reason == "its other results are indices into the table"


def test_refuses_a_shared_table() -> None:
    def forward(s: Any, i: torch.Tensor, o: torch.Tensor) -> Any:
        known = floats(s)
        return F.embedding_bag(i, known, o), known.sum(0)

    assert miss(Model(forward, **table("row")), INDICES, OFFSETS).code is MissCode.SHARED


LOOKUPS = {
    "embedding": lambda s, i: F.embedding(i, floats(s)),
    "padding": lambda s, i: F.embedding(i, floats(s), padding_idx=3),
    "index": lambda s, i: floats(s)[i],
}


@pytest.mark.pairs
@pytest.mark.parametrize("kind", ["tensor", "row", "group", "four"])
@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize("shape", [(2, 3, 2), (0, 5), ()])
def test_lookups_gather_quantized_rows(kind: str, name: str, shape: tuple[int, ...]) -> None:
    indices = torch.randint(0, ROWS, shape)
    done = compiled(Model(LOOKUPS[name], **table(kind)), indices)
    assert stays_quantized(done)


def test_a_lookup_by_hand_is_recognized() -> None:
    source = Model(lambda s, i: s.q[i].float() * s.scale[i], **table("row"))
    done = compiled(source, torch.randint(0, ROWS, (3, 5)))
    assert stays_quantized(done)
    (left,) = done.report.left
    assert left.reason == "its float values are a result of the model"
    assert "nothing quantized is multiplied" in str(done.report)


def test_rows_times_other_rows_are_no_dequantize() -> None:
    source = Model(lambda s, i, j: s.q[i].float() * s.scale[j], **table("row"))
    indices = torch.randint(0, ROWS, (3,))
    done = compiled(source, indices, indices.flip(0))
    assert not done.report.left
