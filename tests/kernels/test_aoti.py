"""The ops inside an AOTInductor package: weights as ordinary constants, any number of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support.cases.linear_grouped import grouped
from tests.support.cases.linear_kernel import Linear, linear
from tests.support.cases.rowwise_kernel import dynamic
from tests.support.cases.weight_only import weight_only

from qfuse.kernels import (
    KernelLibrary,
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w4a8_rows,
    linear_w4a16,
    linear_w8a8,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    linear_w8a8_quantized,
    linear_w8a8_rows,
    linear_w8a16,
    pack_grouped,
    pack_weight,
)

N = 70
K = 36
WIDE = 48


class Chain(torch.nn.Module):
    """Two linears with codes between them, a residual around the second, and weight-only ones.

    The first linear is also one whose halves are multiplied, and rows of that choose their scales.
    """

    w1: torch.Tensor
    s1: torch.Tensor
    w2: torch.Tensor
    s2: torch.Tensor
    w3: torch.Tensor
    s3: torch.Tensor
    scale: torch.Tensor
    w4: torch.Tensor
    s4: torch.Tensor
    z4: torch.Tensor
    o4: torch.Tensor

    def __init__(self, first: Linear, second: Linear) -> None:
        super().__init__()
        self.first, self.second = first, second
        for name, case in (("1", first), ("2", second)):
            packed, sums = pack_weight(case.weight)
            self.register_buffer(f"w{name}", packed)
            self.register_buffer(f"s{name}", sums)
        (_, packed, groups), options = weight_only(
            (1, N + 2), N, 3, zero_point=True, offset=True
        ).arguments()
        parts = packed, groups, options["w_zero_point"], options["w_offset"]
        for name, part in zip(("w4", "s4", "z4", "o4"), parts, strict=True):
            self.register_buffer(name, part)
        packed, sums = pack_weight(first.weight, halves=True)
        self.register_buffer("w3", packed)
        self.register_buffer("s3", sums)
        self.register_buffer("scale", torch.tensor([0.05], dtype=torch.float64))

    def forward(self, x: torch.Tensor, x_scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        codes = linear_w8a8_quantized(
            x, x_scale, None, self.w1, self.s1, self.first.w_scale, bias=self.first.bias,
            epilogue="act(gelu)", out_scale=self.scale, out_zero_point=None, quant_min=-128,
            quant_max=127, out_dtype=torch.int8,
        )  # fmt: skip
        residual = codes.float()[..., :K].to(torch.bfloat16)
        y = linear_w8a8(
            codes, self.scale, None, self.w2, self.s2, self.second.w_scale,
            extras=[residual], epilogue="act(hardtanh,-1.0,1e-05)|add(0,0.5)|cast(float32)",
            product_dtype=torch.bfloat16, out_dtype=torch.float32,
        )  # fmt: skip
        z = linear_w8a16(y, self.w1, self.first.w_scale, bias=self.first.bias)
        last = linear_w4a16(
            F.pad(z, (0, 2)), self.w4, self.s4, w_zero_point=self.z4, w_offset=self.o4,
            out_features=N, epilogue="act(relu)",
        )  # fmt: skip
        chosen, scales, zeros, kept, _ = linear_w8a8_rows(
            x, x_scale, None, self.w3, self.s3, self.first.w_scale, bias=self.first.bias,
            epilogue="glu(silu,up-first)", output=dynamic(formula="ao-asymmetric", keep=True),
        )  # fmt: skip
        return last, chosen, scales, zeros, kept


class Grouped(torch.nn.Module):
    """Two linears with codes between them, one of eight bits, and one whose rows become codes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = grouped((1, WIDE), N, 3, zero_point=True)
        self.second = grouped((1, N), WIDE, 1, bias=False)
        self.third = grouped((1, WIDE), 20, 2, bits=8, weight_zeros="each")
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
        y = linear_w4a8(codes, self.scale, None, *self.packed("b"), out_features=WIDE)
        z = linear_w8a8_grouped_quantized(
            x, x_scale, x_zero, *self.packed("c"), out_features=20, extras=[y[..., :20]],
            epilogue="add(0,1.0)", out_scale=self.scale, out_zero_point=None, quant_min=-128,
            quant_max=127, out_dtype=torch.int8,
        )  # fmt: skip
        rows = linear_w4a8_rows(
            z, self.scale, None, *self.packed("d"), out_features=2 * N,
            epilogue="glu(silu,gate-first)", output=dynamic(),
        )  # fmt: skip
        w = linear_w8a8_grouped(
            rows[0][..., :WIDE], rows[1], None, *self.packed("c"), out_features=20
        )
        return w.relu()


class Both(torch.nn.Module):
    """Both chains: compiling a package takes seconds, whatever is in it."""

    def __init__(self, chain: Chain, grouped: Grouped) -> None:
        super().__init__()
        self.chain, self.grouped = chain, grouped

    def forward(
        self, x: torch.Tensor, wide: torch.Tensor, x_scale: torch.Tensor, x_zero: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return (*self.chain(x, x_scale), self.grouped(wide, x_scale, x_zero))


@pytest.mark.thorough
@pytest.mark.slow
# Of torch's own modules.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_package_gives_the_same(library: KernelLibrary, tmp_path: Path) -> None:
    del library
    # Importing Inductor takes seconds, which the other tests of the run should not pay.
    from torch._inductor import aoti_compile_and_package, aoti_load_package  # noqa: PLC0415, TID251

    module = Both(Chain(linear((1, K), N), linear((1, N), K)), Grouped())
    rows = torch.export.Dim("rows", min=1, max=512)
    x, wide = (torch.ones(2, 9, size, dtype=torch.int8) for size in (K, WIDE))
    example = (x, wide, torch.ones(18), torch.ones(18).int())
    program = torch.export.export(
        module,
        example,
        dynamic_shapes=({1: rows}, {1: rows}, {0: 2 * rows}, {0: 2 * rows}),
        strict=False,
    )
    path = aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "chain.pt2"),
        inductor_configs={"cpp.vec_isa_ok": True, "aot_inductor.metadata": {}},
    )
    packaged = aoti_load_package(path)

    for count in (1, 2, 9, 40):
        x, wide = (
            torch.randint(-128, 128, (2, count, size), dtype=torch.int8) for size in (K, WIDE)
        )
        x_scale, x_zero = torch.rand(2 * count) * 0.01 + 0.003, torch.randint(-9, 9, (2 * count,))
        args = x, wide, x_scale, x_zero.int()

        assert all(map(torch.equal, packaged(*args), module(*args)))
