"""Products with weights in groups, their scales and zero points: bit for bit against exact sums."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases.linear_grouped import BITS, ZEROS, Grouped, grouped
from tests.support.cases.linear_kernel import STORED, codes

from qfuse.ir.errors import InputError
from qfuse.kernels import (
    KernelLibrary,
    instruction_set,
    linear_w4a8,
    linear_w8a8_grouped,
    pack_grouped,
)

# Around the sizes of tiles, blocks and vectors, on every path; strips that share unpacked weights
# are the longest. With tiles, weights are unpacked from 17 rows on.
ROWS = (1, 2, 3, 5, 6, 16, 17, 65, 260)
FEATURES = (1, 15, 16, 17, 63, 64, 65, 130, 200)
# Input features and groups; the whole of K may have any size.
DEPTHS = ((8, 1), (13, 1), (127, 1), (32, 1), (64, 2), (24, 3), (512, 4), (640, 5), (1280, 2))


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_every_size(isa: str, rows: int, bits: int) -> None:
    for index, (n, (k, groups)) in enumerate(itertools.product(FEATURES, DEPTHS)):
        kind: dict[str, Any] = {"dtype": STORED[index % 2], "zero_point": index % 3 == 0}
        case = grouped((rows, k), n, groups, bits=bits, **kind)

        assert torch.equal(case.run(), case.expected()), (isa, rows, n, k, groups)


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("weight_zeros", ZEROS)
@pytest.mark.parametrize("zero_point", [False, True])
def test_every_granularity(
    isa: str, bits: int, dtype: torch.dtype, weight_zeros: str, *, zero_point: bool
) -> None:
    del isa
    for per_token, bias in itertools.product((False, True), repeat=2):
        for shape, n, groups in (((9, 96), 70, 3), ((1, 40), 3, 1), ((70, 256), 65, 2)):
            case = grouped(
                shape, n, groups, bits=bits, dtype=dtype, per_token=per_token,
                zero_point=zero_point, weight_zeros=weight_zeros, bias=bias,
            )  # fmt: skip

            assert torch.equal(case.run(), case.expected())


@pytest.mark.numeric
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 1, 4, 40), (1, 1, 40)])
def test_every_rank(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    case = grouped(shape, 10, 5, zero_point=True)
    y = case.run()

    assert y.shape == (*shape[:-1], 10)
    assert torch.equal(y, case.expected())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0, 16), (4, 0)])
def test_empty(isa: str, shape: tuple[int, ...], bits: int) -> None:
    del isa
    case = grouped(shape, 10, 1, bits=bits, per_token=False, zero_point=True)
    y = case.run()

    assert y.shape == (*shape[:-1], 10)
    assert torch.equal(y, case.expected())
    assert grouped((3, 16), 0, 2, bits=bits).run().shape == (3, 0)


@pytest.mark.numeric
@pytest.mark.parametrize(("x", "zero"), [(255, 0), (0, 255), (255, 255), (128, 0)])
@pytest.mark.parametrize(("bits", "w", "w_zero"), [(4, 15, -128), (4, 0, 127), (8, -128, 127)])
def test_the_largest_sums_are_exact(
    isa: str, x: int, zero: int, bits: int, w: int, w_zero: int
) -> None:
    del isa
    k = 1 << 15
    case = Grouped(
        x=torch.full((2, k), x, dtype=torch.uint8),
        weight=torch.full((3, k), w, dtype=torch.uint8 if bits == 4 else torch.int8),
        x_scale=torch.ones(1),
        w_scale=torch.ones(3, 1),
        x_zero_point=torch.tensor([zero]),
    )
    for zeros in (torch.tensor([w_zero]), torch.full((3, 1), w_zero)):
        y = replace(case, w_zero_point=zeros).run()

        assert torch.equal(y, ((x - zero) * (w - w_zero) * k) * torch.ones(2, 3))


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
def test_groups_are_added_in_their_order(isa: str, bits: int) -> None:
    del isa
    # A different order, or a fused multiply-add, gives other bits.
    case = grouped((3, 512), 40, 64, bits=bits, zero_point=True, bias=False)
    scale = case.w_scale * torch.logspace(-4, 4, 64)
    given = replace(case, w_scale=scale)
    turned = replace(
        case,
        x=case.x.reshape(3, 64, 8).flip(1).reshape(3, 512),
        weight=case.weight.reshape(40, 64, 8).flip(1).reshape(40, 512),
        w_scale=scale.flip(1),
    )

    assert torch.equal(given.run(), given.expected())
    assert torch.equal(turned.run(), turned.expected())
    assert not torch.equal(given.run(), turned.run())


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 4, 130])
def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary, rows: int, bits: int) -> None:
    case = grouped(
        (rows, 768), 203, 6, bits=bits, zero_point=True, weight_zeros="each"
    ).with_options(epilogue="act(gelu)|act(silu)|act(tanh)")
    results = []
    before = torch.get_num_threads()
    for name in library.instruction_sets:
        with instruction_set(name):
            for threads in (1, 2, 8):
                torch.set_num_threads(threads)
                results.append(case.run())
    torch.set_num_threads(before)

    assert len(results) == 3 * len(library.instruction_sets)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
def test_what_is_no_number_stays_where_it_is(isa: str, bits: int) -> None:
    del isa
    case = grouped((5, 64), 70, 2, bits=bits, weight_zeros="each", zero_point=True)
    case.w_scale[3, 1] = torch.nan
    case.w_scale[69, 0] = torch.inf
    case.x_scale[2] = torch.nan
    expected = case.expected()
    y = case.run()

    assert torch.equal(y.isnan(), expected.isnan())
    assert bool(y.isnan()[2].all())
    assert int(y.isnan()[0].sum()) <= 2
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", STORED)
def test_views(isa: str, bits: int, dtype: torch.dtype) -> None:
    del isa
    k = 64
    wide = codes((7, 3, 2 * k), dtype)
    views = {
        "slice of columns": wide[..., 5 : 5 + k],
        "select": wide[:, 1, :k],
        "transpose": codes((k, 9), dtype).t(),
        "expanded row": codes((1, k), dtype).expand(8, k),
        "expanded element": codes((8, 1), dtype).expand(8, k),
        "overlapping rows": codes((200,), dtype).as_strided((8, k), (3, 1)),
        "one row of stride 0": codes((k,), dtype).as_strided((1, k), (0, 1)),
        "one row of stride 7": codes((k,), dtype).as_strided((1, k), (7, 1)),
        "every second column": wide[:, 0, ::2],
    }
    for name, x in views.items():
        for groups in (1, 4):
            given = grouped(tuple(x.shape), 70, groups, bits=bits, zero_point=True, dtype=dtype)
            case = replace(given, x=x)

            assert torch.equal(case.run(), case.expected()), name


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("real", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 33])
def test_the_epilogue(isa: str, bits: int, real: torch.dtype, rows: int) -> None:
    del isa
    case = grouped((rows, 96), 70, 3, bits=bits, zero_point=True)
    residual, factor = torch.randn(rows, 70, dtype=torch.bfloat16), torch.randn(70)
    y = case.with_options(
        product_dtype=real,
        extras=[residual, factor],
        epilogue="act(relu)|add(0,0.5)|mul(1)|cast(float16)",
        out_dtype=torch.float16,
    ).run()

    expected = (F.relu(case.expected().to(real)).add(residual, alpha=0.5) * factor).half()
    assert torch.equal(y, expected)


@pytest.mark.numeric
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("rows", [1, 9])
def test_a_quantized_output(isa: str, bits: int, dtype: torch.dtype, rows: int) -> None:
    del isa
    case = grouped((rows, 96), 70, 3, bits=bits).with_options(epilogue="act(relu)")
    info = torch.iinfo(dtype)
    y = case.run_quantized(
        out_scale=torch.tensor([0.0371]),
        out_zero_point=torch.tensor([5]),
        quant_min=info.min + 9,
        quant_max=info.max - 3,
        out_dtype=dtype,
    )

    code = torch.round(F.relu(case.expected()) * (1 / torch.tensor(0.0371))) + 5
    assert y.dtype == dtype
    assert torch.equal(y, code.clamp(info.min + 9, info.max - 3).to(dtype))


def test_inputs_are_not_written_to(isa: str) -> None:
    del isa
    for bits, k in itertools.product(BITS, (13, 64)):
        case = grouped((7, k), 70, 1, bits=bits, zero_point=True, weight_zeros="each")
        args, options = case.arguments()
        tensors = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
        before = [t.clone() for t in tensors]

        assert torch.equal(case.run(), case.run())
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 64)}, "x must be int8 or uint8"),
        ({"x": torch.zeros(3, 96, dtype=torch.int8)}, "w_packed must be"),
        ({"x": torch.zeros(3, 56, dtype=torch.int8)}, "a group must be a multiple of 8"),
        ({"x": torch.zeros((), dtype=torch.int8)}, "at least one axis"),
        ({"x_scale": torch.ones(2)}, "x_scale has 2 elements, expected 1 or 3"),
        ({"x_zero_point": torch.tensor([128])}, "outside of the range"),
        ({"x_zero_point": torch.tensor([0, 0, -129])}, "outside of the range"),
        ({"w_packed": torch.zeros(1, 8, 64, 4, dtype=torch.int8)}, "w_packed must be"),
        ({"w_sums": torch.zeros(1, 2, 64)}, "w_sums must be"),
        ({"w_sums": torch.zeros(1, 1, 64, dtype=torch.int32)}, "w_sums must be"),
        ({"w_sums": torch.zeros(1, 1, 64, dtype=torch.int16)}, "w_sums must be"),
        ({"w_sums": torch.zeros(1, 2, 64, dtype=torch.int64)}, "w_sums must be"),
        ({"w_scale": torch.ones(1, 3, 64)}, "a group must be"),
        ({"w_scale": torch.ones(1, 0, 64)}, "w_scale must be"),
        ({"w_scale": torch.ones(5)}, "w_scale must be"),
        ({"w_scale": torch.ones(1, 2, 64).double()}, "w_scale must be"),
        ({"w_zero_point": torch.ones(1, 2, 64)}, "w_zero_point must be"),
        ({"w_zero_point": torch.ones(1, dtype=torch.int32)}, "w_zero_point must be int8"),
        ({"w_zero_point": torch.ones(5, dtype=torch.int8)}, "w_zero_point must be"),
        ({"out_features": 65}, "w_packed must be"),
        ({"out_features": -1}, "out_features cannot be -1"),
        ({"bias": torch.ones(4)}, "bias has 4 elements"),
        ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
        ({"epilogue": "relu"}, "not an epilogue step"),
    ],
)
def test_refuses(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    weight = torch.randint(0, 16, (5, 64), dtype=torch.uint8)
    packed = pack_grouped(weight, torch.rand(5, 2), torch.tensor(8))
    arguments = {
        "x": codes((3, 64), torch.int8),
        "x_scale": torch.ones(1),
        "x_zero_point": None,
        "w_packed": packed.weight,
        "w_sums": packed.sums,
        "w_scale": packed.scale,
        "w_zero_point": packed.zero_point,
        "out_features": 5,
    }
    linear_w4a8(**arguments)

    with pytest.raises(RuntimeError, match=message):
        linear_w4a8(**{**arguments, **change})


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 4, 5, 70])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize(
    ("bits", "code", "length", "dtype"),
    [
        (4, 15, 32, torch.int16),
        (4, 15, 2184, torch.int16),
        (4, 15, 2192, torch.int32),
        (8, -128, 256, torch.int16),
        (8, 127, 256, torch.int16),
        (8, -128, 260, torch.int32),
    ],
)
def test_sums_are_short_where_they_fit(  # noqa: PLR0913, PLR0917 - what they depend on
    isa: str, rows: int, zeros: str, bits: int, code: int, length: int, dtype: torch.dtype
) -> None:
    del isa
    case = grouped((rows, 2 * length), 70, 2, bits=bits, zero_point=True, weight_zeros=zeros)
    case.weight[:, :length] = code
    args, options = case.arguments()
    sums = args[4]
    assert sums.dtype == dtype
    assert sums[0, 0].tolist() == [code * length] * 64
    long = (*args[:4], sums.to(torch.int32), *args[5:])
    op = linear_w4a8 if bits == 4 else linear_w8a8_grouped

    assert torch.equal(op(*args, **options), case.expected())
    assert torch.equal(op(*long, **options), case.expected())


def test_refuses_sums_that_could_overflow(library: KernelLibrary) -> None:
    del library
    case = grouped((1, (1 << 15) + 8), 1, 1)

    with pytest.raises(RuntimeError, match="int32 sums are exact up to 32768"):
        case.run()


@pytest.mark.parametrize(
    ("scale", "zero", "message"),
    [
        (torch.ones(5), None, "do not form groups"),
        (torch.ones(4, 2), None, "do not form groups"),
        (torch.ones(5, 3), None, "do not form groups"),
        (torch.ones(5, 0), None, "do not form groups"),
        (torch.ones(5, 2), torch.tensor([128]), "outside of"),
        (torch.ones(5, 2), torch.full((5, 2), 2**32), "outside of"),
        (torch.ones(5, 2), torch.zeros(2, 5), "zero points"),
    ],
)
def test_packing_refuses(scale: torch.Tensor, zero: torch.Tensor | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pack_grouped(torch.zeros(5, 16, dtype=torch.uint8), scale, zero)
