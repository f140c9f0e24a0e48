"""Weight-only linears of four and eight bits, with groups, zero points and offsets."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.linear_kernel import REAL, views_of_rows
from tests.support.cases.weight_only import weight_only

from qfuse.ir.ops.epilogue import Epilogue
from qfuse.kernels import KernelLibrary, instruction_set, linear_w4a16, linear_w8a16

pytestmark = pytest.mark.numeric

ROWS = (1, 2, 3, 4, 5, 17, 65)
FEATURES = (1, 16, 63, 64, 65, 130, 200)
# Groups and their size; 520 and 1040 input features are more than a panel holds.
GROUPS = ((1, 1), (1, 7), (1, 13), (1, 72), (1, 519), (2, 8), (3, 32), (5, 40), (2, 520), (4, 260))
OTHER = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("n", FEATURES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_size(isa: str, bits: int, n: int, rows: int) -> None:
    del isa
    for index, (groups, size) in enumerate(GROUPS, start=n):
        for dtype, zero_point, offset in itertools.product(REAL, [False, True], [False, True]):
            whole = size % 8 == 0
            if (offset or groups > 1) and not whole:
                continue
            case = weight_only(
                (rows, groups * size), n, groups, bits=bits, dtype=dtype, zero_point=zero_point,
                offset=offset, bias=index % 2 == 0, compute=OTHER[index % 3 == 0],
            )  # fmt: skip

            case.check(case.run())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 1, 4, 64), (1, 1, 64)])
def test_every_rank(isa: str, shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> None:
    del isa
    case = weight_only(shape, 70, 2, bits=bits, dtype=dtype, zero_point=True)

    case.check(case.run())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (2, 0), (9, 0)])
def test_empty(isa: str, shape: tuple[int, ...], dtype: torch.dtype, bits: int) -> None:
    del isa
    case = weight_only(shape, 10, bits=bits, dtype=dtype, zero_point=True)
    assert case.bias is not None

    assert torch.equal(case.run(), case.bias.to(dtype).expand(*shape[:-1], 10))
    assert weight_only(shape, 0, bits=bits, dtype=dtype).run().shape == (*shape[:-1], 0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [1, 3, 6])
@pytest.mark.parametrize("zero_point", [False, True])
def test_whole_numbers_are_exact(
    isa: str, dtype: torch.dtype, rows: int, bits: int, zero_point: bool
) -> None:
    """Every code and zero point, times small numbers: nothing is rounded, so nothing differs."""
    del isa
    case = weight_only((rows, 64), 300, 4, bits=bits, zero_point=zero_point, bias=False)
    x = torch.randint(-3, 4, (rows, 64)).to(dtype)
    case = replace(case, x=x, scale=2.0 ** torch.randint(-2, 3, (300, 4)))

    y = case.run(epilogue="cast(float32)", out_dtype=torch.float32)

    expected = (x.double() @ case.unrounded().t()).float()
    assert torch.equal(y, expected.to(dtype).float())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_read_the_weight_of_the_source(isa: str, dtype: torch.dtype, bits: int) -> None:
    """One weight per output: rows that are zero but for one element give it back bit for bit."""
    del isa
    for compute in REAL:
        case = weight_only(
            (64, 64), 40, 2, bits=bits, dtype=dtype, zero_point=True, offset=True, bias=False,
            compute=compute,
        )  # fmt: skip
        for tested in (case, replace(case, offset=None)):
            y = replace(tested, x=torch.eye(64).to(dtype)).run()

            assert torch.equal(y, tested.dequantized().t())


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("bits", [4, 8])
def test_views(isa: str, dtype: torch.dtype, rows: int, bits: int) -> None:
    del isa
    for name, x in views_of_rows(rows, 64, dtype).items():
        case = replace(weight_only(tuple(x.shape), 70, 2, bits=bits, dtype=dtype), x=x)

        assert torch.equal(case.run(), replace(case, x=x.clone()).run()), name
        case.check(case.run())


@pytest.mark.parametrize("bits", [4, 8])
def test_threads_do_not_change_a_bit(isa: str, bits: int) -> None:
    del isa
    before = torch.get_num_threads()
    for rows, dtype in itertools.product((1, 3, 300), REAL):
        case = weight_only((rows, 1040), 330, 5, bits=bits, dtype=dtype, zero_point=True)
        results = []
        for threads in (1, 2, 5, 8):
            torch.set_num_threads(threads)
            results.append(case.run())
        torch.set_num_threads(before)

        case.check(results[0])
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [2, 30])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_epilogue_is_the_same(isa: str, dtype: torch.dtype, rows: int, bits: int) -> None:
    del isa
    case = weight_only((rows, 64), 70, 2, bits=bits, dtype=dtype)
    extra = torch.randn(rows, 70)
    text = "act(relu)|mul(0)|cast(bfloat16)|add(0,1.0)"

    y = case.run(extras=[extra], epilogue=text, out_dtype=torch.float32)

    assert torch.equal(y, Epilogue.parse(text).apply(case.run(), [extra]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [2, 9])
def test_what_is_not_finite_stays_where_it_is(
    isa: str, rows: int, dtype: torch.dtype, bits: int
) -> None:
    del isa
    case = weight_only((rows, 64), 70, 2, bits=bits, dtype=dtype, zero_point=True)
    good = case.run()
    x, scale = case.x.clone(), case.scale.clone()
    x[0, 5] = torch.nan
    scale[3, 1], scale[4, 0] = torch.nan, torch.inf

    y = replace(case, x=x, scale=scale).run()

    assert y[0].isnan().all()
    assert y[:, 3].isnan().all()
    assert not y[:, 4].isfinite().any()
    others = [column for column in range(70) if column not in {3, 4}]
    assert torch.equal(y[1:, others], good[1:, others])
    x[0, 5] = torch.inf
    w = case.dequantized()
    sign = (x[:1, 5] * w[:, 5]).float()
    y = replace(case, x=x).run()[0].float()
    assert torch.equal(y.isnan(), sign.isnan())
    assert torch.equal(y[~sign.isnan()], sign[~sign.isnan()])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("power", [-124, -112, 50, 64, 100])
def test_small_and_large_numbers_keep_their_bits(
    isa: str, rows: int, bits: int, power: int
) -> None:
    """Numbers near the ends of float32, whose results are in the middle of it."""
    del isa
    for groups, zero_point, offset in itertools.product((1, 2), [False, True], [False, True]):
        case = weight_only(
            (rows, 64), 70, groups, bits=bits, zero_point=zero_point, offset=offset, bias=False
        )
        x = case.x.sign() * (1 + torch.rand(rows, 64)) * 2.0**power
        offsets = None if case.offset is None else case.offset * 2.0**-power
        case = replace(case, x=x, scale=case.scale * 2.0**-power, offset=offsets)

        case.check(case.run())


def test_a_large_row_leaves_others_their_bits(isa: str) -> None:
    del isa
    case = weight_only((3, 64), 70, 2, bits=8, zero_point=True, bias=False)
    x = case.x * torch.tensor([[2.0**100], [2.0**-120], [1.0]])

    y = replace(case, x=x).run(epilogue="mul(0)", extras=[torch.tensor([2.0**60])])

    alone = [
        replace(case, x=row[None]).run(epilogue="mul(0)", extras=[torch.tensor([2.0**60])])
        for row in x[1:]
    ]
    torch.testing.assert_close(y[1:], torch.cat(alone), rtol=1e-4, atol=0)
    exact = x[1:].double() @ case.unrounded().t() * 2.0**60
    magnitude = x[1:].abs().double() @ case.unrounded().abs().t() * 2.0**60
    assert ((y[1:].double() - exact).abs() <= 1e-4 * magnitude).all()


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_four_bits_of_a_zero_point_count(isa: str, rows: int, dtype: torch.dtype) -> None:
    """The others are ignored, on every path alike."""
    del isa
    for offset in (False, True):
        case = weight_only((rows, 64), 70, 2, dtype=dtype, zero_point=True, offset=offset)
        assert case.zero_point is not None
        high = torch.randint(0, 16, case.zero_point.shape, dtype=torch.uint8) << 4

        y = replace(case, zero_point=case.zero_point | high).run()

        assert torch.equal(y, case.run())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 20])
@pytest.mark.parametrize(("zero_point", "offset"), [(False, False), (True, False), (True, True)])
def test_few_rows_have_the_bits_of_one(
    library: KernelLibrary, bits: int, groups: int, *, zero_point: bool, offset: bool
) -> None:
    """Rows take other numbers of features at a time; groups are added in their order."""
    case = weight_only(
        (4, 320), 130, groups, bits=bits, zero_point=zero_point, offset=offset, bias=False
    )
    # Sums in another order would differ: what is added first is lost beside what follows.
    sizes = 10.0 ** torch.linspace(-6, 6, groups)
    case = replace(case, scale=case.scale * sizes)
    results = {}
    for name in {"portable", "avx2", "avx_vnni", "avx512"} & set(library.instruction_sets):
        with instruction_set(name):
            together = case.run()
            for rows, first in ((1, 0), (1, 3), (2, 1), (3, 0)):
                some = replace(case, x=case.x[first : first + rows])
                assert torch.equal(some.run(), together[first : first + rows]), (name, rows)
        results[name] = together
        case.check(together)

    fused = [y for name, y in results.items() if name != "portable"]
    assert all(torch.equal(fused[0], y) for y in fused)


def test_instruction_sets_agree(library: KernelLibrary) -> None:
    """In float32 within the rounding of the sums; what is one product is the same bit for bit."""
    for bits, rows in itertools.product((4, 8), (1, 9)):
        case = weight_only((rows, 8), 70, bits=bits, zero_point=True)
        case.x[:, 1:] = 0.0
        results = []
        for name in library.instruction_sets:
            with instruction_set(name):
                results.append(case.run())

        assert all(torch.equal(results[0], y) for y in results)


BAD = [
    ({"x": torch.zeros(3, 64, dtype=torch.int8)}, "x must be float32"),
    ({"x": torch.zeros(3, 72)}, "groups, and weights with offsets|w_packed must be"),
    ({"x": torch.zeros(())}, "at least one axis"),
    ({"out_features": 71}, "w_packed must be|w_scale must be|bias has 70"),
    ({"out_features": -1}, "out_features is -1"),
    ({"w_scale": torch.ones(2, 3, 64)}, "multiple of 8"),
    ({"w_scale": torch.ones(1, 2, 64)}, "w_scale must be"),
    ({"w_scale": torch.ones(2, 2, 64, dtype=torch.int32)}, "w_scale has type Int"),
    ({"w_zero_point": torch.ones(2, 2, 64)}, "w_zero_point has type Float"),
    ({"w_zero_point": torch.ones(2, 2, 64, dtype=torch.int32)}, "w_zero_point has type Int"),
    ({"w_offset": torch.ones(2, 1, 64)}, "w_offset must be"),
    ({"w_offset": torch.ones(2, 2, 64, dtype=torch.int8)}, "w_offset has type Char"),
    ({"bias": torch.ones(4)}, "bias has 4 elements"),
    ({"compute": torch.float64}, "compute must be"),
    ({"out_dtype": torch.bfloat16}, "the epilogue gives Float"),
    ({"epilogue": "add(0,1.0)"}, "wants an extra that is not there"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
@pytest.mark.parametrize("bits", [4, 8])
def test_refuses(library: KernelLibrary, bits: int, change: dict[str, Any], message: str) -> None:
    del library
    case = weight_only((3, 64), 70, 2, bits=bits)
    (x, packed, scale), options = case.arguments()
    arguments = {"x": x, "w_packed": packed, "w_scale": scale, **options, **change}
    run = linear_w4a16 if bits == 4 else linear_w8a16

    with pytest.raises(RuntimeError, match=message):
        run(**arguments)


def test_refuses_groups_and_codes_of_the_wrong_kind(library: KernelLibrary) -> None:
    del library
    four, eight = weight_only((3, 64), 70, 2), weight_only((3, 64), 70, 2, bits=8)
    (x, packed, scale), options = four.arguments()
    with pytest.raises(RuntimeError, match="w_packed of 8 bits cannot have type Byte"):
        linear_w8a16(x, packed, scale, **options)
    with pytest.raises(RuntimeError, match="w_packed of 4 bits cannot have type Char"):
        linear_w4a16(x, eight.arguments()[0][1], scale, **options)
    with pytest.raises(RuntimeError, match="multiple of 8"):
        weight_only((3, 24), 70, 2).run()
    with pytest.raises(RuntimeError, match="multiple of 8"):
        weight_only((3, 7), 70, offset=True).run()


def test_inputs_are_not_written_to(library: KernelLibrary) -> None:
    for name, rows in itertools.product(library.instruction_sets, (2, 7)):
        case = weight_only((rows, 64), 70, 2, zero_point=True, offset=True)
        args, options = case.arguments()
        tensors = [t for t in (*args, *options.values()) if isinstance(t, torch.Tensor)]
        before = [t.clone() for t in tensors]
        with instruction_set(name):
            linear_w4a16(*args, **options)

        assert all(map(torch.equal, tensors, before))
