"""The int8 product of two activations: bit for bit against exact arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tests.support.cases.linear_kernel import REAL, codes
from tests.support.cases.matmul_kernel import GRANULARITIES, SIGNS, Product, product
from tests.support.guard_pages import guarded

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import KernelLibrary, instruction_set

# Around the sizes of tiles, panels, groups, blocks and vectors, on every path.
ROWS = (1, 5, 7, 17, 25, 70)
COLUMNS = (1, 3, 15, 17, 63, 64, 65, 130)
DEPTHS = (1, 3, 4, 5, 62, 64, 65, 129)
BATCHES = (
    ((), ()),
    ((1,), (1,)),
    ((3,), (3,)),
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((3,), (2, 3)),
    ((2, 1), (1, 3)),
    ((4,), ()),
    ((), (4,)),
    ((2, 1, 2), (5, 2)),
)


@pytest.mark.numeric
@pytest.mark.parametrize("transposed", [False, True])
def test_every_size(isa: str, transposed: bool) -> None:
    for index, (m, n, k) in enumerate(itertools.product(ROWS, COLUMNS, DEPTHS)):
        signs = SIGNS[index % 2], SIGNS[index // 2 % 2]
        zeros = bool(index // 4 % 2), bool(index // 8 % 2)
        case = product((2, m, k), (2, k, n), dtypes=signs, zero_points=zeros, transposed=transposed)

        assert torch.equal(case.run(), case.expected()), (isa, m, n, k)


@pytest.mark.numeric
@pytest.mark.parametrize("dtypes", list(itertools.product(SIGNS, SIGNS)), ids=str)
@pytest.mark.parametrize("zeros", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("kinds", list(itertools.product(GRANULARITIES, repeat=2)), ids="-".join)
def test_every_granularity(
    isa: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    zeros: tuple[bool, bool],
    kinds: tuple[str, str],
) -> None:
    del isa
    for m, n, k in ((9, 70, 36), (33, 5, 67)):
        case = product((2, 3, m, k), (2, 3, k, n), dtypes=dtypes, zero_points=zeros, kinds=kinds)

        assert torch.equal(case.run(), case.expected())


@pytest.mark.numeric
@pytest.mark.parametrize("batches", BATCHES, ids=str)
@pytest.mark.parametrize("kinds", [("lines", "lines"), ("entries", "tensor")], ids="-".join)
def test_batch_axes_broadcast(
    isa: str, batches: tuple[tuple[int, ...], tuple[int, ...]], kinds: tuple[str, str]
) -> None:
    del isa
    x, other = batches
    case = product((*x, 7, 12), (*other, 12, 70), zero_points=(True, True), kinds=kinds)

    assert torch.equal(case.run(), case.expected())


@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("lines", "lines")], ids="-".join)
@pytest.mark.parametrize(
    ("x", "other"),
    [
        ((2, 0, 8), (2, 8, 5)),
        ((2, 3, 0), (2, 0, 5)),
        ((2, 3, 8), (2, 8, 0)),
        ((0, 3, 8), (0, 8, 5)),
        ((0, 3, 8), (1, 8, 5)),
        ((1, 3, 8), (0, 8, 5)),
        ((0, 0), (0, 0)),
    ],
    ids=str,
)
def test_empty(
    isa: str, x: tuple[int, ...], other: tuple[int, ...], kinds: tuple[str, str]
) -> None:
    del isa
    case = product(x, other, zero_points=(True, True), kinds=kinds)
    y = case.run()

    assert y.shape == case.expected().shape
    assert torch.equal(y, case.expected())


def views(shape: tuple[int, int, int, int]) -> dict[str, torch.Tensor]:
    """Tensors of one shape in many layouts."""
    a, b, c, d = shape
    return {
        "heads behind tokens": codes((a, c, b, d), torch.int8).transpose(1, 2),
        "columns first": codes((a, b, d, c), torch.int8).transpose(2, 3),
        "batch last": codes((c, d, a, b), torch.int8).permute(2, 3, 0, 1),
        "slice": codes((a, b, c + 2, 2 * d), torch.int8)[:, :, 1:-1, 3 : 3 + d],
        "every second column": codes((a, b, c, 2 * d), torch.int8)[..., ::2],
        "expanded batch": codes((a, 1, c, d), torch.int8).expand(shape),
        "expanded rows": codes((a, b, 1, d), torch.int8).expand(shape),
        "expanded columns": codes((a, b, c, 1), torch.int8).expand(shape),
        "one element": codes((1, 1, 1, 1), torch.int8).expand(shape),
    }


@pytest.mark.numeric
@pytest.mark.parametrize("sizes", [(6, 8, 70), (33, 64, 5), (1, 7, 1)], ids=str)
def test_views(isa: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    case = product((2, 3, m, k), (2, 3, k, n), zero_points=(True, True), kinds=("lines", "lines"))
    for left, x in views((2, 3, m, k)).items():
        for right, other in views((2, 3, k, n)).items():
            changed = replace(case, x=x, other=other)

            assert torch.equal(changed.run(), changed.expected()), (isa, left, right)


@pytest.mark.parametrize("stride", [0, 1, 3])
def test_axes_of_size_one_of_any_stride(isa: str, stride: int) -> None:
    del isa
    for m, k, n in ((1, 8, 5), (4, 1, 5), (4, 8, 1), (1, 1, 1)):
        case = product((1, m, k), (1, k, n), zero_points=(True, True))
        x, other = (
            t.as_strided(
                t.shape,
                [
                    stride if size == 1 else own
                    for size, own in zip(t.shape, t.stride(), strict=True)
                ],
            )
            for t in (case.x, case.other)
        )
        changed = replace(case, x=x, other=other)

        assert torch.equal(changed.run(), case.expected())


@pytest.mark.numeric
def test_the_same_tensor_on_both_sides(isa: str) -> None:
    del isa
    case = product((3, 20, 20), (3, 20, 20), zero_points=(True, True))
    for other in (case.x, case.x.transpose(-1, -2)):
        shared = replace(case, other=other, other_zero_point=case.x_zero_point)

        assert torch.equal(shared.run(), shared.expected())


@pytest.mark.numeric
@pytest.mark.parametrize(
    ("x", "x_zero", "w", "w_zero", "k"),
    [
        (255, 0, -128, None, 1 << 16),
        (0, 255, 127, None, 1 << 16),
        (255, 0, 127, -128, 1 << 15),
        (0, 255, -128, 127, 1 << 15),
        (255, 0, -128, None, (1 << 16) + 1),
        (255, 0, -128, None, (1 << 17) + 4),
        (0, 255, 127, -128, (1 << 15) + 1),
        (0, 255, -128, 127, (1 << 17) + 3),
    ],
)
def test_the_largest_sums_are_exact(
    isa: str, x: int, x_zero: int, w: int, w_zero: int | None, k: int
) -> None:
    del isa
    one = torch.ones(1)
    case = Product(
        torch.full((2, k), x, dtype=torch.uint8),
        one,
        torch.tensor([x_zero]),
        torch.full((k, 3), w, dtype=torch.int8),
        one,
        None if w_zero is None else torch.tensor([w_zero]),
    )

    assert torch.equal(case.run(), case.expected())


@pytest.mark.numeric
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("lines", "lines")], ids="-".join)
@pytest.mark.parametrize("dtypes", list(itertools.product(SIGNS, SIGNS)), ids=str)
@pytest.mark.parametrize(
    ("sizes", "zeros"),
    [
        ((3, 66, 65_540), (True, True)),
        ((26, 5, 65_543), (False, False)),
        ((1, 3, 140_001), (True, False)),
    ],
)
def test_sums_that_int32_does_not_hold(
    isa: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    kinds: tuple[str, str],
    threads: int,
    sizes: tuple[int, int, int],
    zeros: tuple[bool, bool],
) -> None:
    del isa
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        m, n, k = sizes
        case = product(
            (2, m, k), (2, k, n), dtypes=dtypes, kinds=kinds, zero_points=zeros, transposed=m > 1
        )
        assert torch.equal(case.run(), case.expected())
    finally:
        torch.set_num_threads(before)


@pytest.mark.numeric
def test_an_epilogue_and_a_quantized_result_of_long_sums(isa: str) -> None:
    del isa
    case = product((2, 5, 65_541), (2, 65_541, 7), zero_points=(True, True))
    case = replace(case, x_scale=torch.tensor(1e-4), other_scale=torch.tensor(1e-4))
    mask = torch.randn(5, 7)
    steps = case.with_options(epilogue="add(0,1.0)|act(relu)", extras=[mask])
    want = torch.relu(case.expected() + mask)
    assert torch.equal(steps.run(), want)

    output = {"out_dtype": torch.int8, "quant_min": -128, "quant_max": 127}
    got = steps.run_quantized(
        out_scale=torch.tensor(0.03), out_zero_point=torch.tensor(3), **output
    )
    assert torch.equal(got, ((want * (1 / 0.03)).round() + 3).clamp(-128, 127).to(torch.int8))


STEPS = (
    "act(relu)|add(0,0.5)|mul(1)",
    "mul(2)|add(3,1.0)",
    "add(4,1.0,0.1,7)|act(hardtanh,-0.5,2.5)",
    "cast(bfloat16)|add(5,1.0)|cast(float32)",
    "prelu(1)",
)


@pytest.mark.numeric
@pytest.mark.parametrize("text", STEPS)
@pytest.mark.parametrize("real", REAL)
def test_epilogues_broadcast_as_in_torch(isa: str, text: str, real: torch.dtype) -> None:
    del isa
    every = [
        torch.randn(2, 3, 9, 70),
        torch.randn(70).to(real),
        torch.randn(1),
        torch.randn(2, 1, 1, 70),
        codes((3, 9, 1), torch.uint8),
        torch.randn(70, 9).t().to(torch.bfloat16),
    ]
    case = product(
        (2, 3, 9, 36), (2, 3, 36, 70), kinds=("lines", "lines"), zero_points=(True, True)
    )
    steps = Epilogue.parse(text.replace(",0.1,7", ""))
    used = sorted({step.index for step in steps.ops if hasattr(step, "index")})
    extras = [every[index] for index in used]
    for new, old in enumerate(used):
        text = text.replace(f"({old})", f"({new})").replace(f"({old},", f"({new},")
    floats = [e.float().sub(7).mul(0.1) if e.dtype is torch.uint8 else e for e in extras]
    known = Epilogue.parse(text.replace(",0.1,7", ""))
    want = known.apply(case.expected().to(real), floats)
    got = case.with_options(
        extras=extras, epilogue=text, product_dtype=real, out_dtype=want.dtype
    ).run()

    assert torch.equal(got, want)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", SIGNS)
@pytest.mark.parametrize("text", ["", "act(relu)", "mul(0)"])
@pytest.mark.parametrize("zero_points", [(False, False), (True, True)], ids=str)
def test_quantized_results(
    isa: str, dtype: torch.dtype, text: str, zero_points: tuple[bool, bool]
) -> None:
    del isa
    low = torch.iinfo(dtype).min
    scale, zero = torch.tensor([0.37]), torch.tensor([low + 100], dtype=torch.int32)
    for m, n, k in ((25, 130, 36), (3, 17, 5)):
        case = product((3, m, k), (3, k, n), zero_points=zero_points).with_options(
            extras=[torch.rand(n)] if text == "mul(0)" else [], epilogue=text
        )
        y = Epilogue.parse(text).apply(case.expected(), case.options["extras"])
        want = ((y * scale.reciprocal()).round() + zero).clamp(low, low + 255).to(dtype)
        got = case.run_quantized(
            out_scale=scale,
            out_zero_point=zero,
            quant_min=low,
            quant_max=low + 255,
            out_dtype=dtype,
        )

        assert torch.equal(got, want)


@pytest.mark.numeric
def test_a_scale_that_is_nan_stays_in_its_row_and_column(isa: str) -> None:
    del isa
    case = product((9, 12), (12, 20), kinds=("lines", "lines"))
    case.x_scale[4], case.other_scale[0, 7] = torch.nan, torch.nan

    assert torch.equal(case.run().isnan(), case.expected().isnan())
    assert torch.equal(case.run().nan_to_num(), case.expected().nan_to_num())


@pytest.mark.numeric
def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary) -> None:
    case = product(
        (5, 61, 67), (5, 67, 203), kinds=("lines", "lines"), zero_points=(True, True)
    ).with_options(epilogue="act(gelu)|act(silu)|act(tanh)|act(gelu_tanh)")
    # With more threads than entries, the right operand is packed by all of them.
    one = product((1, 61, 67), (1, 67, 203), kinds=("lines", "lines"), zero_points=(True, True))
    results: list[tuple[torch.Tensor, torch.Tensor]] = []
    before = torch.get_num_threads()
    for name in library.instruction_sets:
        with instruction_set(name):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append((case.run(), one.run()))
    torch.set_num_threads(before)

    assert len(results) == 3 * len(library.instruction_sets)
    first = results[0]
    assert all(torch.equal(a, b) for other in results for a, b in zip(first, other, strict=True))


def test_inputs_are_not_written_to(isa: str) -> None:
    del isa
    case = product((3, 7, 21), (3, 21, 70), zero_points=(True, True), kinds=("lines", "lines"))
    extra = torch.randn(7, 70)
    tensors = [*case.arguments, extra]
    before = [t.clone() for t in tensors]
    changed = case.with_options(extras=[extra], epilogue="act(relu)|add(0,1.0)")

    assert torch.equal(changed.run(), changed.run())
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_nothing_outside_of_the_operands_is_touched(
    isa: str, at_start: bool, transposed: bool
) -> None:
    del isa
    for m, n, k in ((1, 1, 1), (5, 17, 3), (7, 63, 65), (25, 130, 62), (6, 64, 64)):
        case = product(
            (2, m, k), (2, k, n), zero_points=(True, True), kinds=("lines", "lines"),
            transposed=transposed,
        )  # fmt: skip
        extra = torch.randn(1, n)
        x, x_scale, x_zero, other, other_scale, other_zero, last = (
            guarded(t, at_start=at_start) for t in (*case.arguments, extra)
        )
        apart = Product(x, x_scale, x_zero, other, other_scale, other_zero)
        apart = apart.with_options(extras=[last], epilogue="add(0,1.0)")

        assert torch.equal(apart.run(), case.expected() + extra)
