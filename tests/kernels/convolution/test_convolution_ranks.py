"""One and three dimensions, no batch axis, empty sizes, and transposed convolutions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.cases.convolution_kernel import Convolution, Window, convolution, window
from tests.support.cases.linear_kernel import STORED
from tests.support.guard_pages import assert_same_with_guards

from qfuse.kernels import KernelLibrary, convolution_w8a8, instruction_set

pytestmark = pytest.mark.numeric


def check(case: Convolution) -> None:
    y, expected = case.run(), case.expected()
    assert torch.equal(y, expected), (case.window, case.x.shape, y.shape)
    assert y.stride() == expected.stride()


LINES = [
    window(1),
    window(3, padding=1),
    window(5, padding=2, stride=3),
    window(3, dilation=4, padding=4),
    window(4, groups=2, padding=3),
]


@pytest.mark.parametrize("w", LINES, ids=str)
@pytest.mark.parametrize("dtype", STORED)
def test_one_dimension(isa: str, w: Window, dtype: torch.dtype) -> None:
    del isa
    for channels, features, size in ((4, 6, 12), (2, 70, 40), (66, 2, 13)):
        case = convolution((3, channels, size), features, w, dtype=dtype, weight_zero_point=True)
        check(case)
        # Adjacent channels, as after a transpose.
        x = case.x.transpose(1, 2).contiguous().transpose(1, 2)
        check(replace(case, x=x))


VOLUMES = [
    window(1, 1, 1),
    window(3, 3, 3, padding=1),
    window(3, 3, 3, padding=1, stride=2),
    window(2, 1, 3, padding=(0, 1, 2), dilation=(3, 2, 1)),
    window(3, 3, 3, padding=1, groups=2),
]


@pytest.mark.parametrize("w", VOLUMES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_three_dimensions(isa: str, w: Window, *, last: bool) -> None:
    del isa
    for channels, features in ((4, 6), (2, 70), (34, 2)):
        check(convolution((2, channels, 5, 6, 4), features, w, last=last))


@pytest.mark.parametrize(
    ("shape", "w"),
    [
        ((6, 9), window(3, padding=1)),
        ((6, 9, 8), window(3, 3, padding=1, stride=2)),
        ((6, 4, 5, 3), window(3, 2, 1)),
        ((6, 9, 8), window(1, 1, groups=3)),
        ((6, 4, 5), window(3, 3, stride=2, transposed=True)),
    ],
    ids=str,
)
def test_no_batch_axis(isa: str, shape: tuple[int, ...], w: Window) -> None:
    del isa
    case = convolution(shape, 9, w)
    extra = torch.randn(9, *[1] * len(w.kernel))
    y = case.with_options(
        extras=[extra, torch.randn(case.run().shape)], epilogue="mul(0)|add(1,1.0)"
    )
    check(y)
    check(replace(y, x=case.x.movedim(0, -1).contiguous().movedim(-1, 0)))


@pytest.mark.parametrize(
    ("shape", "features", "w"),
    [
        ((0, 4, 5, 5), 6, window(3, 3)),
        ((0, 4, 5, 5), 6, window(1, 1)),
        ((2, 0, 5, 5), 6, window(3, 3)),
        ((2, 4, 5, 5), 0, window(3, 3)),
        ((2, 4, 0, 5), 6, window(3, 3, padding=2)),
        ((0, 4, 5), 6, window(3)),
        ((0, 4, 5, 5), 6, window(3, 3, stride=2, transposed=True)),
    ],
    ids=str,
)
def test_empty(isa: str, shape: tuple[int, ...], features: int, w: Window) -> None:
    del isa
    case = convolution(shape, features, w)
    y = case.run()

    assert y.dtype == torch.float32
    if shape[0] == 0:
        assert y.shape == case.expected().shape
        return
    # torch refuses the rest. Without any input every tap is 0, which leaves the bias.
    assert case.bias is not None
    assert y.shape[:2] == (shape[0], features)
    assert torch.equal(y, case.bias.reshape(-1, 1, 1).expand(y.shape))


TRANSPOSED: dict[str, dict[str, Any]] = {
    "stride 1": {"stride": 1},
    "stride 2": {"stride": 2},
    "padded": {"stride": 2, "padding": 1},
    "output padding": {"stride": 2, "padding": 1, "output_padding": 1},
    "dilated": {"stride": 2, "dilation": 3, "padding": 2},
    "dilation shares a factor": {"stride": 4, "dilation": 2, "output_padding": 1},
    "stride beyond the kernel": {"stride": 5, "output_padding": 3},
    "stride beyond the image": {"stride": 7, "padding": 2},
}


def transposed(kernel: tuple[int, ...], name: str, groups: int = 1) -> Window:
    return window(*kernel, transposed=True, groups=groups, **TRANSPOSED[name])


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.parametrize("kernel", [(3,), (3, 3), (4, 2), (2, 3, 3)], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_transposed(isa: str, name: str, kernel: tuple[int, ...], groups: int) -> None:
    del isa
    w = transposed(kernel, name, groups)
    sizes = itertools.product((1, 3, 8), (1, 70))
    for index, (channels, features) in enumerate(sizes):
        shape = (2, channels * groups, *(5, 4, 3)[: len(kernel)])
        kind = {"weight_zero_point": bool(index % 3), "last": bool(index % 2)}

        check(convolution(shape, features * groups, w, dtype=STORED[index % 2], **kind))


@pytest.mark.parametrize("name", ["stride 1", "padded", "output padding", "dilated"])
@pytest.mark.parametrize("last", [False, True])
def test_extras_of_transposed(isa: str, name: str, *, last: bool) -> None:
    del isa
    case = convolution((2, 8, 5, 4), 70, transposed((3, 3), name), last=last)
    shape = case.run().shape
    extras = [
        torch.randn(shape),
        torch.randn(2, 70, 1, 1),
        torch.randn(70, 1, 1),
        torch.randn(shape[2:]),
    ]
    check(case.with_options(extras=extras, epilogue="add(0,1.0)|mul(1)|add(2,1.0)|mul(3)"))


def test_transposed_in_any_size(isa: str) -> None:
    """Rows around tiles and panels."""
    del isa
    for size in ((1, 1), (1, 30), (17, 23)):
        check(convolution((3, 12, *size), 66, transposed((4, 4), "padded")))


def test_transposed_paths_and_threads_agree(library: KernelLibrary) -> None:
    case = convolution((2, 20, 9, 13), 130, transposed((3, 3), "output padding"))
    case = case.with_options(epilogue="act(gelu)")
    results, before = [], torch.get_num_threads()
    for name in library.instruction_sets:
        with instruction_set(name):
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                results.append(case.run())
    torch.set_num_threads(before)

    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_within_bounds(isa: str, name: str) -> None:
    del isa
    for channels, features in ((1, 1), (3, 17), (16, 65)):
        case = convolution((2, channels, 4, 3), features, transposed((3, 2), name))
        extras = [torch.randn(case.run().shape)]
        args, options = case.with_options(extras=extras, epilogue="add(0,1.0)").arguments()

        assert_same_with_guards(convolution_w8a8, args, options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_padding": [2, 0]}, "output_padding 2 is not less than"),
        ({"padding": [7, 0]}, "the output would have 0 pixels"),
        ({"stride": [3, 2]}, "w_packed must be|w_sums has 4 rows"),
        ({"transposed": False}, "w_sums must be"),
    ],
)
def test_refuses_transposed(library: KernelLibrary, change: dict[str, Any], message: str) -> None:
    del library
    case = convolution((1, 4, 6, 5), 6, window(4, 4, stride=2, transposed=True))
    args, options = case.arguments()

    with pytest.raises(RuntimeError, match=message):
        convolution_w8a8(*args, **{**options, **change})
