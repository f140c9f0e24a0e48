"""A compiled module is called like its source, and refuses what would make compiled code run wild."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.backends.conftest import Pair

from qfuse.backends import CompiledModule
from qfuse.ir.errors import InputError


def inputs(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 16), torch.randint(0, 10, (rows,))


def assert_agree(pair: Pair, *args: torch.Tensor, **kwargs: torch.Tensor) -> None:
    for have, want in zip(pair.fast(*args, **kwargs), pair.plain(*args, **kwargs), strict=True):
        torch.testing.assert_close(have, want)
        assert steps(have) == steps(want)


def steps(value: torch.Tensor) -> list[int]:
    """The strides that mean something: those of axes with more than one element."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1]


@pytest.fixture(params=["aoti", "eager"])
def module(request: pytest.FixtureRequest, projection: Pair) -> CompiledModule:
    return projection.fast if request.param == "aoti" else projection.plain


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.numeric
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 300])
def test_any_number_of_rows(projection: Pair, rows: int) -> None:
    assert_agree(projection, *inputs(rows))


def test_keywords(projection: Pair) -> None:
    x, ids = inputs(3)
    assert_agree(projection, ids=ids, x=x)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
    "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x),
    "reversed columns": lambda x: x.flip(1).as_strided(x.shape, x.stride()),
    "negated view": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.numeric
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [1, 6])
def test_any_strides(projection: Pair, layout: str, rows: int) -> None:
    x, ids = inputs(rows)
    given = LAYOUTS[layout](x)
    before = given.clone()
    assert_agree(projection, given, ids)
    assert torch.equal(given, before)


@pytest.mark.numeric
@pytest.mark.parametrize("step", [0, 1, 7, 64])
def test_one_row_of_any_row_stride(projection: Pair, step: int) -> None:
    """Libraries take the leading dimension of a matrix from the stride of its rows."""
    x, ids = inputs(1)
    assert_agree(projection, x.as_strided((1, 16), (step, 1)), ids)


WRONG: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]], str]] = {
    "dtype": (lambda x, i: (x.double(), i), r"x: expected float32\[.*got float64"),
    "half the bytes": (lambda x, i: (x, i.int()), r"ids: expected int64\[.*got int32"),
    "more axes": (lambda x, i: (x[None], i), r"x: expected .*got float32\[1, 4, 16\]"),
    "fewer axes": (lambda x, i: (x[0], i), r"x: expected .*got float32\[16\]"),
    "fewer columns": (lambda x, i: (x[:, :8], i), r"x: expected .*got float32\[4, 8\]"),
    "rows that differ": (lambda x, i: (x, i[:2]), r"ids: expected .*got int64\[2\]"),
    "too many rows": (lambda x, i: (x.repeat(2000, 1), i.repeat(2000)), "n <= 4096"),
    "no rows": (lambda x, i: (x[:0], i[:0]), "1 <= n"),
    "an integer": (lambda x, _: (x, 3), "ids: expected int64.*got the int 3"),
    "nothing": (lambda x, _: (x,), "ids is missing"),
    "one more": (lambda x, i: (x, i, i), "argument 2 is unexpected"),
    "another device": (lambda x, i: (x.to("meta"), i), "x: expected .*on cpu, got .*meta"),
    "sparse": (lambda x, i: (x.to_sparse(), i), "x: expected .*sparse"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_refuses_what_it_was_not_compiled_for(module: CompiledModule, wrong: str) -> None:
    make, message = WRONG[wrong]
    args = make(*inputs(4))
    with pytest.raises(InputError, match=message):
        module(*args)


@pytest.mark.parametrize("grad", [True, False])
def test_grad_mode_makes_no_difference(module: CompiledModule, grad: bool) -> None:
    x, ids = inputs(4)
    x.requires_grad_()
    with torch.set_grad_enabled(grad):
        results = module(x, ids)
    assert not any(result.requires_grad for result in results)
    torch.testing.assert_close(results, module(x.detach(), ids))


def test_inference_mode(module: CompiledModule) -> None:
    x, ids = inputs(4)
    want = module(x, ids)
    with torch.inference_mode():
        torch.testing.assert_close(module(x.clone(), ids.clone()), want)
        made_inside = x.clone()
    torch.testing.assert_close(module(made_inside, ids), want)


def test_autocast_does_not_reach_inside(module: CompiledModule) -> None:
    x, ids = inputs(4)
    want = module(x, ids)
    with torch.autocast("cpu", torch.bfloat16):
        results = module(x, ids)
    for have, expected in zip(results, want, strict=True):
        assert torch.equal(have, expected)


def test_results_are_the_callers(module: CompiledModule) -> None:
    """Neither later calls nor writes of the caller reach a result, an input or a constant."""
    x, ids = inputs(4)
    first = module(x, ids)
    kept = [result.clone() for result in first]
    module(*inputs(4))
    for result, then in zip(first, kept, strict=True):
        assert torch.equal(result, then)


def test_a_constant_that_is_returned_is_a_copy(projection: Pair) -> None:
    x, ids = inputs(4)
    constant = projection.fast(x, ids)[4]
    kept = constant.clone()
    constant.fill_(-1.0)
    assert torch.equal(projection.fast(x, ids)[4], kept)


def test_several_threads(module: CompiledModule) -> None:
    cases = [inputs(rows) for rows in (1, 3, 17, 40, 64, 2)]
    want = [module(*case) for case in cases]
    wrong: list[str] = []

    def work(index: int) -> None:
        for _ in range(20):
            for have, expected in zip(module(*cases[index]), want[index], strict=True):
                if not torch.allclose(have, expected, atol=1e-5):
                    wrong.append(f"thread {index}")

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 8, 19])
def test_any_number_of_openmp_threads(projection: Pair, count: int) -> None:
    torch.set_num_threads(count)
    assert_agree(projection, *inputs(300))


def test_refuses_to_be_pickled(module: CompiledModule) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(module)
