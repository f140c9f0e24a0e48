"""What torch believes about the ops while it traces is what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.cases.fake_kernels import OPCHECKS, to_meta
from tests.support.cases.linear_kernel import REAL, STORED, linear
from tests.support.cases.rowwise_kernel import dynamic
from tests.support.cases.weight_only import weight_only as weight_only_case

from qfuse.ir.errors import InputError
from qfuse.kernels import KernelLibrary, linear_w8a8, pack_weight


def arguments(
    shape: tuple[int, ...], *, product_dtype: torch.dtype = torch.float32, **kind: Any
) -> list[Any]:
    """Every argument of ``qfuse::linear_w8a8``, by position."""
    case = linear(shape, 70, **kind)
    packed, sums = pack_weight(case.weight, case.w_zero_point)
    extra = torch.randn(*shape[:-1], 70, dtype=torch.bfloat16)
    return [
        case.x, case.x_scale, case.x_zero_point, packed, sums, case.w_scale, case.w_zero_point,
        case.bias, [extra], "act(gelu)|add(0,1.0)|cast(float32)", product_dtype, torch.float32,
    ]  # fmt: skip


def output(dtype: torch.dtype) -> list[Any]:
    """What ``qfuse::linear_w8a8_quantized`` takes instead of the last argument."""
    low = torch.iinfo(dtype).min
    return [torch.tensor([0.1]), torch.tensor([1]), low, low + 255, True, False, dtype]


def rows() -> tuple[object, ...]:
    """What ``qfuse::linear_w8a8_rows`` takes besides."""
    return dynamic(keep=True, zero_point_dtype=torch.int8).arguments()


def halved(args: list[Any]) -> list[Any]:
    """The arguments of a linear whose halves are multiplied."""
    packed = torch.zeros(2, 5, 64, 4, dtype=torch.int8)
    epilogue = "add(0,1.0)|glu(silu,up-first)|cast(float32)"
    return [*args[:3], packed, *args[4:9], epilogue, *args[10:]]


def weight_only(shape: tuple[int, ...], dtype: torch.dtype, bits: int = 8) -> list[Any]:
    """Every argument of ``qfuse::linear_w8a16`` or ``qfuse::linear_w4a16``."""
    case = weight_only_case(shape, 70, bits=bits, dtype=dtype, zero_point=True)
    (x, packed, scale), options = case.arguments()
    zero, extra = options["w_zero_point"], torch.randn(*shape[:-1], 70)
    return [
        x, packed, scale, zero, None, 70, case.bias, [extra], "add(0,1.0)", torch.float32,
        torch.float32,
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 20), (2, 3, 20), (20,)])
@pytest.mark.parametrize("zero_point", [False, True])
def test_opcheck(library: KernelLibrary, shape: tuple[int, ...], *, zero_point: bool) -> None:
    del library
    args = arguments(shape, zero_point=zero_point, weight_zero_point=zero_point)
    stored = (*args[:-1], *output(torch.int8))
    real = weight_only(shape, torch.bfloat16)
    four = weight_only(shape, torch.bfloat16, bits=4)

    torch.library.opcheck(torch.ops.qfuse.linear_w8a8.default, tuple(args), test_utils=OPCHECKS)
    torch.library.opcheck(
        torch.ops.qfuse.linear_w8a8_quantized.default, stored, test_utils=OPCHECKS
    )
    torch.library.opcheck(torch.ops.qfuse.linear_w8a16.default, tuple(real), test_utils=OPCHECKS)
    torch.library.opcheck(torch.ops.qfuse.linear_w4a16.default, tuple(four), test_utils=OPCHECKS)
    torch.library.opcheck(
        torch.ops.qfuse.linear_w8a8_rows.default, (*args, *rows()), test_utils=OPCHECKS
    )
    torch.library.opcheck(
        torch.ops.qfuse.linear_w8a8_rows.default, (*halved(args), *rows()), test_utils=OPCHECKS
    )


@pytest.mark.parametrize("shape", [(5, 20), (2, 3, 20), (20,), (0, 20), (1, 1, 20)])
def test_fake_results_are_like_real_ones(library: KernelLibrary, shape: tuple[int, ...]) -> None:
    del library
    calls = [
        (torch.ops.qfuse.linear_w8a8.default, arguments(shape, product_dtype=real)) for real in REAL
    ]
    calls += [
        (torch.ops.qfuse.linear_w8a8_quantized.default, [*arguments(shape)[:-1], *output(dtype)])
        for dtype in STORED
    ]
    calls += [(torch.ops.qfuse.linear_w8a16.default, weight_only(shape, dtype)) for dtype in REAL]
    calls += [
        (torch.ops.qfuse.linear_w4a16.default, weight_only(shape, dtype, 4)) for dtype in REAL
    ]
    calls += [
        (torch.ops.qfuse.linear_w8a8.default, halved(arguments(shape))),
        (torch.ops.qfuse.linear_w8a8_rows.default, [*arguments(shape), *rows()]),
        (torch.ops.qfuse.linear_w8a8_rows.default, [*halved(arguments(shape)), *rows()]),
    ]
    for op, args in calls:
        results = op(*args)
        fakes = op(*to_meta(args))
        pairs = zip(*(r if isinstance(r, tuple) else (r,) for r in (results, fakes)), strict=True)
        for real, meta in pairs:
            assert meta.device.type == "meta"
            assert (meta.shape, meta.dtype) == (real.shape, real.dtype)
            assert meta.stride() == real.stride()


def test_sizes_may_be_symbolic(library: KernelLibrary) -> None:
    del library

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            _, self.x_scale, _, self.packed, self.sums, self.w_scale, *_ = arguments((1, 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear_w8a8(x, self.x_scale, None, self.packed, self.sums, self.w_scale)

    module = Module()
    rows = torch.export.Dim("rows", min=1, max=512)
    example = torch.ones(3, 7, 20, dtype=torch.int8)
    program = torch.export.export(module, (example,), dynamic_shapes={"x": {1: rows}}, strict=False)

    for count in (1, 2, 30):
        x = torch.ones(3, count, 20, dtype=torch.int8)
        assert torch.equal(program.module()(x), module(x))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(5, 20), "x must be int8 or uint8"),
        (0, torch.ones(5, 24, dtype=torch.int8), "does not fit"),
        (3, torch.ones(2, 5, 64, 4), "does not fit"),
        (4, torch.zeros(129, dtype=torch.int32), "does not fit"),
        (10, torch.float64, "product_dtype must be one of"),
        (11, torch.int8, "the result must be one of"),
    ],
)
def test_fakes_refuse_what_cannot_be(
    library: KernelLibrary, index: int, value: Any, message: str
) -> None:
    del library
    args = arguments((5, 20))
    args[index] = value
    meta = to_meta(args)

    with pytest.raises(InputError, match=message):
        torch.ops.qfuse.linear_w8a8.default(*meta)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(5, 20, dtype=torch.int8), "must be floats"),
        (0, torch.ones(5, 28), "does not fit"),
        (1, torch.ones(2, 5, 64, 4, dtype=torch.int16), "does not fit"),
        (5, 129, "does not fit"),
        (5, -1, "out_features cannot be -1"),
        (0, torch.ones(()), "at least one axis"),
        (2, torch.ones(2, 1, 64, dtype=torch.int8), "w_scale must be float"),
        (2, torch.ones(71), "w_scale .* does not fit"),
        (2, torch.ones(2, 3, 64), "3 groups share 20"),
        (2, torch.ones(2, 5, 64), "5 groups share 20"),
        (2, torch.ones(2, 0, 64), "0 groups share 20"),
        (3, torch.ones(2, 1, 64), "w_zero_point must be torch"),
        (3, torch.ones(1, dtype=torch.int16), "w_zero_point must be torch"),
        (4, torch.ones(70), "groups, and weights with offsets"),
        (6, torch.ones(4), "bias has 4 elements"),
        (6, torch.ones(70, dtype=torch.int8), "bias must be float"),
        (8, "glu(silu,up-first)", "does not support GLU"),
        (8, "halves(gate-first)|act(relu)|up()|times()", "does not support GLU"),
        (9, torch.float64, "must be floats"),
        (10, torch.int8, "must be floats"),
    ],
)
def test_fakes_refuse_weight_only_arguments(
    library: KernelLibrary, bits: int, index: int, value: Any, message: str
) -> None:
    del library
    op = getattr(torch.ops.qfuse, f"linear_w{bits}a16").default
    args = weight_only((5, 20), torch.float32, bits)
    args[index] = value
    meta = to_meta(args)

    with pytest.raises(InputError, match=message):
        op(*meta)
    with pytest.raises(RuntimeError):
        op(*args)


@pytest.mark.parametrize("bits", [4, 8])
def test_fakes_refuse_parameters_of_groups(library: KernelLibrary, bits: int) -> None:
    del library
    op = getattr(torch.ops.qfuse, f"linear_w{bits}a16").default
    args = weight_only((5, 16), torch.float32, bits)
    stored = args[3].dtype
    good = {2: torch.ones(2, 2, 64), 3: torch.ones(2, 2, 64, dtype=stored), 4: torch.ones(2, 2, 64)}
    bad = {
        2: torch.ones(1, 2, 64),
        3: torch.ones(70, dtype=stored),
        4: torch.ones(2, 2, 64, dtype=stored),
    }
    for changes in ({}, *({index: value} for index, value in bad.items())):
        given = [{**good, **changes}.get(i, arg) for i, arg in enumerate(args)]
        meta = to_meta(given)
        if not changes:
            assert op(*meta).shape == op(*given).shape
            continue
        with pytest.raises(InputError, match=r"does not fit|must be"):
            op(*meta)
        with pytest.raises(RuntimeError):
            op(*given)


def test_fakes_refuse_codes_of_another_type(library: KernelLibrary) -> None:
    del library
    args = [*arguments((5, 20))[:-1], *output(torch.int8)[:-1], torch.int16]
    meta = to_meta(args)

    with pytest.raises(InputError, match="the result must be one of"):
        torch.ops.qfuse.linear_w8a8_quantized.default(*meta)


def test_fakes_refuse_weights_that_are_not_packed_in_halves(library: KernelLibrary) -> None:
    del library
    meta = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to("meta"), halved(arguments((5, 20)))
    )
    for index, value in ((3, meta[3][:1]), (4, meta[4][:69])):
        args = [*meta[:index], value, *meta[index + 1 :]]
        with pytest.raises(InputError, match=r"does not fit.*in two halves"):
            torch.ops.qfuse.linear_w8a8.default(*args)


def test_an_argument_given_twice_is_refused() -> None:
    with pytest.raises(TypeError, match="given by position and by name"):
        linear_w8a8(torch.zeros(1, 4, dtype=torch.int8), torch.ones(1), x_scale=torch.ones(1))
