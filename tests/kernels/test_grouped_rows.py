"""Grouped linears whose halves are multiplied, or whose rows become codes: as two ops do it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.support.cases.glu import activated
from tests.support.cases.linear_grouped import BITS, ZEROS, Grouped, grouped
from tests.support.cases.linear_kernel import REAL, STORED
from tests.support.cases.rowwise_kernel import dynamic

from qfuse.ir.errors import InputError
from qfuse.kernels import (
    KernelLibrary,
    instruction_set,
    linear_w4a8,
    linear_w4a8_quantized,
    linear_w4a8_rows,
    linear_w8a8_grouped,
    linear_w8a8_grouped_quantized,
    linear_w8a8_grouped_rows,
    pack_grouped,
)
from qfuse.kernels.rowwise import RowwiseOutput, activation_quantized

pytestmark = pytest.mark.numeric

ROWS = (1, 2, 5, 7, 70)
GLU = "glu(silu,gate-first)"


@dataclass(frozen=True)
class Halved:
    """A linear of ``2 * h`` features whose halves are multiplied."""

    case: Grouped
    epilogue: str = GLU
    float_dtype: torch.dtype = torch.float32

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        case = self.case
        packed = pack_grouped(case.weight, case.w_scale, case.w_zero_point, halves=True)
        options = {"out_features": len(case.weight), "bias": case.bias, "epilogue": self.epilogue}
        args = (case.x, case.x_scale, case.x_zero_point, *packed)
        return args, {**options, "product_dtype": self.float_dtype}

    def run(self) -> torch.Tensor:
        args, options = self.arguments()
        return (linear_w4a8 if self.case.four else linear_w8a8_grouped)(*args, **options)

    def run_quantized(self, **output: Any) -> torch.Tensor:
        args, options = self.arguments()
        op = linear_w4a8_quantized if self.case.four else linear_w8a8_grouped_quantized
        return op(*args, **{**options, **output})

    def run_rows(self, output: RowwiseOutput) -> tuple[torch.Tensor, ...]:
        args, options = self.arguments()
        op = linear_w4a8_rows if self.case.four else linear_w8a8_grouped_rows
        return op(*args, **options, output=output)

    def expected(self) -> torch.Tensor:
        """The product of the halves of the float result; the activation is the kernel's own."""
        y = self.case.expected().to(self.float_dtype)
        gate, up = y.chunk(2, -1)
        return activated(gate, "act(silu)") * up if gate.numel() else gate * up


def halved(shape: tuple[int, ...], h: int, groups: int, **kind: Any) -> Halved:
    """A random problem of ``2 * h`` features."""
    return Halved(grouped(shape, 2 * h, groups, **kind))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_halves(isa: str, rows: int, bits: int) -> None:
    del isa
    sizes = itertools.product((1, 15, 64, 65, 130), ((13, 1), (40, 1), (64, 2), (512, 4)))
    for index, (h, (k, groups)) in enumerate(sizes):
        kind = {"weight_zeros": ZEROS[index % 3], "dtype": STORED[index % 2]}
        case = halved((rows, k), h, groups, bits=bits, zero_point=index % 4 > 1, **kind)

        assert torch.equal(case.run(), case.expected()), (h, k, groups)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_that_become_codes(isa: str, rows: int, bits: int) -> None:
    del isa
    for h, (k, groups), keep in itertools.product((15, 130), ((13, 1), (512, 4)), (True, False)):
        case = halved((rows, k), h, groups, bits=bits, zero_point=True)
        output = dynamic(keep=keep)
        want = activation_quantized(case.expected(), "", output)

        for mine, other in zip(case.run_rows(output), want, strict=True):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
            assert torch.equal(mine, other)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("real", REAL)
def test_rows_of_other_types_and_without_halves(isa: str, bits: int, real: torch.dtype) -> None:
    del isa
    case = grouped((2, 5, 64), 70, 2, bits=bits, zero_point=True)
    args, options = case.arguments()
    op = linear_w4a8_rows if case.four else linear_w8a8_grouped_rows
    extra = torch.randn(2, 5, 70).to(real)
    output = dynamic(compute=real, keep=True)
    got = op(
        *args, **options, output=output, extras=[extra], epilogue="add(0,1.0)", product_dtype=real
    )
    want = activation_quantized(case.expected().to(real) + extra, "", output)

    assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))


@pytest.mark.parametrize("bits", BITS)
def test_a_product_of_halves_that_is_quantized(isa: str, bits: int) -> None:
    del isa
    case = halved((9, 96), 35, 3, bits=bits, weight_zeros="each")
    y = case.run_quantized(
        out_scale=torch.tensor([0.0371]),
        out_zero_point=torch.tensor([5]),
        quant_min=-100,
        quant_max=127,
        out_dtype=torch.int8,
    )

    code = torch.round(case.expected() * (1 / torch.tensor(0.0371))) + 5
    assert torch.equal(y, code.clamp(-100, 127).to(torch.int8))


@pytest.mark.parametrize("bits", BITS)
def test_paths_and_threads_agree_bit_for_bit(library: KernelLibrary, bits: int) -> None:
    case = halved((61, 256), 130, 4, bits=bits, zero_point=True)
    results = []
    before = torch.get_num_threads()
    for name in library.instruction_sets:
        with instruction_set(name):
            for threads in (1, 2, 8):
                torch.set_num_threads(threads)
                results.append(case.run_rows(dynamic(keep=True)))
    torch.set_num_threads(before)

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_empty(isa: str, shape: tuple[int, ...]) -> None:
    del isa
    case = halved(shape, 35, 1, per_token=False)

    assert torch.equal(case.run(), case.expected())
    assert case.run_rows(dynamic())[0].shape == (*shape[:-1], 35)


def test_packing_refuses_what_has_no_halves() -> None:
    with pytest.raises(InputError, match="cannot be split into halves"):
        pack_grouped(torch.zeros(5, 8, dtype=torch.uint8), torch.ones(5, 1), halves=True)


def test_refuses_weights_whose_halves_are_packed_together(library: KernelLibrary) -> None:
    del library
    case = grouped((3, 64), 130, 2)
    args, options = case.arguments()
    with pytest.raises(RuntimeError, match="each half for itself"):
        linear_w4a8(*args, **{**options, "epilogue": GLU})
    meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
    wide = {**options, "bias": None, "epilogue": GLU}
    with pytest.raises(InputError, match="in two halves"):
        linear_w4a8(*meta, **wide)


def test_fakes_of_rows(library: KernelLibrary) -> None:
    del library
    for bits, shape in itertools.product(BITS, ((5, 64), (2, 3, 64), (0, 64))):
        case = halved(shape, 35, 2, bits=bits)
        args, options = case.arguments()
        output = dynamic(keep=True)
        op = linear_w4a8_rows if case.case.four else linear_w8a8_grouped_rows
        to_meta = torch.utils._pytree.tree_map_only
        meta = op(
            *to_meta(torch.Tensor, lambda t: t.to("meta"), args),
            **to_meta(torch.Tensor, lambda t: t.to("meta"), options),
            output=output,
        )
        for mine, other in zip(meta, case.run_rows(output), strict=True):
            assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
