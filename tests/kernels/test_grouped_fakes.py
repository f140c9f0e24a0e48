"""What torch believes about the grouped ops while it traces is what they do, packages included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cases.linear_grouped import BITS, grouped
from tests.support.cases.linear_kernel import REAL, STORED
from tests.support.cases.rowwise_kernel import dynamic

from qfuse.ir.errors import InputError
from qfuse.kernels import (
    KernelLibrary,
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w4a8_rows,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    pack_grouped,
)

CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)
K, N = 48, 70


def call(shape: tuple[int, ...], bits: int, out: torch.dtype, **kind: Any) -> tuple[Any, list[Any]]:
    """An op and every argument of it, by position."""
    case = grouped(shape, N, 3, bits=bits, weight_zeros="each", **kind)
    args, options = case.arguments()
    extra = torch.randn(*shape[:-1], N, dtype=torch.bfloat16)
    rest = [options["out_features"], case.bias, [extra], "add(0,1.0)|cast(float32)", torch.bfloat16]
    ops = torch.ops.qfuse
    if out.is_floating_point:
        op = ops.linear_w4a8 if case.four else ops.linear_w8a8_grouped
        rest[3] = f"cast({str(out).removeprefix('torch.')})"
        return op.default, [*args, *rest, out]
    op = ops.linear_w4a8_quantized if case.four else ops.linear_w8a8_grouped_quantized
    low = torch.iinfo(out).min
    output = [torch.tensor([0.1]), torch.tensor([1]), low, low + 255, True, False, out]
    return op.default, [*args, *rest, *output]


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K), (K,)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("out", [torch.float32, torch.int8])
def test_opcheck(
    library: KernelLibrary, shape: tuple[int, ...], bits: int, out: torch.dtype
) -> None:
    del library
    op, args = call(shape, bits, out, zero_point=True)
    torch.library.opcheck(op, tuple(args), test_utils=CHECKS)


@pytest.mark.parametrize("shape", [(5, K), (K,), (0, K), (1, 1, K)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("out", [*REAL, *STORED])
def test_fake_results_are_like_real_ones(
    library: KernelLibrary, shape: tuple[int, ...], bits: int, out: torch.dtype
) -> None:
    del library
    op, args = call(shape, bits, out)
    real = op(*args)
    meta = op(*torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args))

    assert meta.device.type == "meta"
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, torch.ones(5, K), "x must be int8 or uint8"),
        (0, torch.ones(5, 64, dtype=torch.int8), "does not fit"),
        (3, torch.ones(2, 6, 64, 4, dtype=torch.int8), "does not fit"),
        (4, torch.zeros(2, 2, 64, dtype=torch.int32), "w_sums .* does not fit"),
        (6, torch.zeros(2, 2, 64, dtype=torch.int8), "w_zero_point .* does not fit"),
        (7, 129, "does not fit"),
        (7, -1, "out_features cannot be -1"),
        (0, torch.ones((), dtype=torch.int8), "at least one axis"),
        (1, torch.ones(1, dtype=torch.int32), "x_scale must be float"),
        (4, torch.zeros(2, 3, 64), "w_sums must be torch.int16 or torch.int32"),
        (5, torch.ones(70), r"w_scale \(70,\) must be \[blocks, groups, 64\]"),
        (5, torch.ones(2, 0, 64), "must be .blocks, groups, 64"),
        (5, torch.ones(2, 5, 64), "5 groups of K = 48"),
        (5, torch.ones(2, 4, 64), "4 groups of K = 48"),
        (5, torch.ones(2, 3, 64, dtype=torch.float64), "w_scale must be torch.float32"),
        (6, torch.zeros(2, 3, 64, dtype=torch.int32), "w_zero_point must be torch.int8"),
        (6, torch.zeros(1), "w_zero_point must be torch.int8"),
        (8, torch.ones(4), "bias has 4 elements"),
        (8, torch.ones(70, dtype=torch.int8), "bias must be float"),
        (11, torch.float64, "real must be one of"),
        (-1, torch.int8, "the result must be one of"),
    ],
)
def test_fakes_refuse_what_cannot_be(
    library: KernelLibrary, index: int, value: Any, message: str
) -> None:
    del library
    op, args = call((5, K), 4, torch.float32)
    args[index] = value
    meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)

    with pytest.raises(InputError, match=message):
        op(*meta)
    with pytest.raises(RuntimeError):
        op(*args)


def test_fakes_refuse_groups_whose_sums_do_not_fit(library: KernelLibrary) -> None:
    del library
    op, args = call((5, K), 8, torch.float32)
    k = (1 << 15) + 4
    args[0] = torch.ones(5, k, dtype=torch.int8)
    args[3] = torch.ones(2, k // 4, 64, 4, dtype=torch.int8)
    args[4:7] = [torch.ones(2, 1, 64, dtype=torch.int32), torch.ones(2, 1, 64), None]
    meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)

    with pytest.raises(InputError, match="at most 32768 fit int32"):
        op(*meta)
    with pytest.raises(RuntimeError, match="up to 32768"):
        op(*args)


class Chain(torch.nn.Module):
    """Two linears with codes between them, one of eight bits, and one whose rows become codes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = grouped((1, K), N, 3, zero_point=True)
        self.second = grouped((1, N), K, 1, bias=False)
        self.third = grouped((1, K), 20, 2, bits=8, weight_zeros="each")
        for case, name in ((self.first, "a"), (self.second, "b"), (self.third, "c")):
            for index, tensor in enumerate(case.arguments()[0][3:]):
                self.register_buffer(f"{name}{index}", tensor)
        halves = grouped((1, 20), 2 * N, 1, weight_zeros="each")
        packed = pack_grouped(halves.weight, halves.w_scale, halves.w_zero_point, halves=True)
        for index, part in enumerate(packed):
            self.register_buffer(f"d{index}", part)
        self.register_buffer("scale", torch.tensor([0.05], dtype=torch.float64))

    def packed(self, name: str) -> list[torch.Tensor]:
        return [self.get_buffer(f"{name}{index}") for index in range(4)]

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor) -> torch.Tensor:
        codes = linear_w4a8_quantized(
            x, x_scale, x_zero, *self.packed("a"), out_features=N, bias=self.first.bias,
            epilogue="act(gelu)", out_scale=self.scale, out_zero_point=None, quant_min=-128,
            quant_max=127, out_dtype=torch.int8,
        )  # fmt: skip
        y = linear_w4a8(codes, self.scale, None, *self.packed("b"), out_features=K)
        z = linear_w8a8_grouped_quantized(
            x, x_scale, x_zero, *self.packed("c"), out_features=20, extras=[y[..., :20]],
            epilogue="add(0,1.0)", out_scale=self.scale, out_zero_point=None, quant_min=-128,
            quant_max=127, out_dtype=torch.int8,
        )  # fmt: skip
        rows = linear_w4a8_rows(
            z, self.scale, None, *self.packed("d"), out_features=2 * N,
            epilogue="glu(silu,gate-first)", output=dynamic(),
        )  # fmt: skip
        w = linear_w8a8_grouped(rows[0][..., :K], rows[1], None, *self.packed("c"), out_features=20)
        return w.relu()


@pytest.mark.slow
# Of torch's own modules.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_package_gives_the_same(library: KernelLibrary, tmp_path: Path) -> None:
    del library
    # Importing Inductor takes seconds, which the other tests of the run should not pay.
    from torch._inductor import aoti_compile_and_package, aoti_load_package  # noqa: PLC0415, TID251

    module = Chain()
    rows = torch.export.Dim("rows", min=1, max=512)
    example = (torch.ones(2, 9, K, dtype=torch.int8), torch.ones(18), torch.ones(18).int())
    program = torch.export.export(
        module,
        example,
        dynamic_shapes={"x": {1: rows}, "x_scale": {0: 2 * rows}, "x_zero": {0: 2 * rows}},
        strict=False,
    )
    path = aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "chain.pt2"),
        inductor_configs={"cpp.vec_isa_ok": True, "aot_inductor.metadata": {}},
    )
    packaged = aoti_load_package(path)

    for count in (1, 2, 9, 40):
        x = torch.randint(-128, 128, (2, count, K), dtype=torch.int8)
        scale, zero = torch.rand(2 * count) * 0.01 + 0.003, torch.randint(-9, 9, (2 * count,)).int()

        assert torch.equal(packaged(x, scale, zero), module(x, scale, zero))
