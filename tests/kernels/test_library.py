from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.support.cases.linear_kernel import linear

from qfuse.ir.errors import OptionsError
from qfuse.kernels import KernelLibrary, instruction_set, load


def test_loading_again_gives_the_same(library: KernelLibrary) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: load(), range(32)))

    assert all(result is library for result in results)


def test_the_library_says_what_it_is(library: KernelLibrary) -> None:
    assert library.reason == ""
    assert library.path is not None
    assert library.path.is_file()
    assert library.instruction_sets[0] == "portable"


def test_an_unknown_instruction_set_is_refused(library: KernelLibrary) -> None:
    assert "portable" in library.instruction_sets
    before = torch.ops.qfuse.chosen_kernels()

    with pytest.raises(OptionsError, match=r"'mmx'[^$]*portable"), instruction_set("mmx"):
        pass

    assert torch.ops.qfuse.chosen_kernels() == before


def test_the_instruction_set_is_given_back(library: KernelLibrary) -> None:
    before = torch.ops.qfuse.chosen_kernels()

    with instruction_set("portable"):
        assert torch.ops.qfuse.chosen_kernels() == "portable"
        with instruction_set(library.instruction_sets[-1]):
            assert torch.ops.qfuse.chosen_kernels() == library.instruction_sets[-1]
        assert torch.ops.qfuse.chosen_kernels() == "portable"

    assert torch.ops.qfuse.chosen_kernels() == before


def test_several_threads_may_call_at_once(isa: str) -> None:
    del isa
    cases = [linear((rows, 130), 70) for rows in (1, 5, 40, 200)] * 4

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda case: case.run(), cases))

    assert all(torch.equal(y, case.expected()) for y, case in zip(results, cases, strict=True))


@pytest.mark.parametrize("rows", [3, 40])
def test_onednn_works_between_calls(isa: str, rows: int) -> None:
    """Whatever a path leaves in the processor would break the next oneDNN product."""
    del isa
    case = linear((rows, 128), 128)
    a = torch.randn(rows, 128).bfloat16()
    for _ in range(3):
        assert torch.equal(case.run(), case.expected())
        torch.testing.assert_close(
            (a @ a.t()).float(), a.float() @ a.float().t(), rtol=0.02, atol=0.1
        )
        torch._int_mm(case.x, case.weight.t())
