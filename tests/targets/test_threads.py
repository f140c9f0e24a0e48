"""The number of threads of an operator is limited for one thread, and then as before."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from qfuse import kernels
from qfuse.ir.errors import OptionsError
from qfuse.targets import checked_threads, limited_threads


@pytest.fixture(autouse=True)
def two() -> Iterator[None]:
    """Two threads per operator, in this thread and in new ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_new_thread() -> int:
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("count", [1, 3])
def test_the_limit_ends(count: int) -> None:
    with limited_threads(count):
        assert torch.get_num_threads() == count
        with limited_threads(5):
            assert torch.get_num_threads() == 5
        assert torch.get_num_threads() == count
    assert torch.get_num_threads() == 2


def test_the_limit_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), limited_threads(1):
        _ = 1 // 0
    assert torch.get_num_threads() == 2


def test_none_changes_nothing() -> None:
    with limited_threads(None):
        assert torch.get_num_threads() == 2


def test_new_threads_do_not_notice() -> None:
    before = in_new_thread()
    with limited_threads(7):
        assert in_new_thread() == before
    assert in_new_thread() == before


def test_the_first_use_of_a_thread_does_not_undo_it() -> None:
    seen: list[int] = []

    def work() -> None:
        with limited_threads(7):
            # Split among threads, for which torch would set the number of a new thread.
            torch.ones(1 << 20).exp()
            seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [7]


_LEFT = torch.randn(512, 512)
_CODES = torch.randint(-128, 128, (512, 512), dtype=torch.int8)
WORK: dict[str, Callable[[], object]] = {
    "ATen": _LEFT.exp,
    "MKL": lambda: _LEFT @ _LEFT,
    "oneDNN": lambda: _LEFT.bfloat16() @ _LEFT.bfloat16().t(),
    "int8": lambda: torch._int_mm(_CODES, _CODES.t()),
}


def other_threads_share(work: Callable[[], object]) -> float:
    """Return the CPU time of this process's other threads, as a share of this thread's."""
    work()
    others, own = -time.process_time() + time.thread_time(), -time.thread_time()
    for _ in range(8):
        work()
    return (others + time.process_time() - time.thread_time()) / (own + time.thread_time())


@pytest.mark.parametrize("name", WORK)
def test_one_thread_does_all_the_work(name: str) -> None:
    with limited_threads(1):
        # With two threads it is about 1, every time; threads of earlier tests may still spin once.
        assert min(other_threads_share(WORK[name]) for _ in range(5)) < 0.3


def test_two_threads_share_the_work() -> None:
    assert max(other_threads_share(WORK["MKL"]) for _ in range(5)) > 0.3


@pytest.mark.parametrize("value", [0, -1, 1 << 20, 1.5, "2", True])
def test_refuses_what_is_not_a_number_of_threads(value: object) -> None:
    with pytest.raises(OptionsError, match="threads must be a number from 1 to"):
        checked_threads(value)


def test_none_and_numbers_are_accepted() -> None:
    assert [checked_threads(value) for value in (None, 1, 64)] == [None, 1, 64]


@pytest.mark.own_kernels
def test_the_first_call_of_a_kernel_in_a_thread_keeps_the_limit() -> None:
    assert kernels.load().available
    x, one = torch.ones(64, 512, dtype=torch.int8), torch.ones(())
    packed, scales = kernels.pack_weight(torch.ones(512, 512, dtype=torch.int8)), torch.ones(512)
    seen: list[int] = []

    def run() -> None:
        with limited_threads(1):
            kernels.linear_w8a8(x, one, None, *packed, scales)
            seen.append(torch.get_num_threads())
        seen.append(torch.get_num_threads())

    for _ in range(2):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    assert seen == [1, 2, 1, 2]
