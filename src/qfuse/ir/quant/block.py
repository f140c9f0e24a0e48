"""Block grids: their shape, their text, and how a view of the tensor changes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from qfuse.ir.errors import BlockError, NormalizeError
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import Size, exact_quotient, same_shape, same_size

if TYPE_CHECKING:
    from qfuse.ir.quant.spec import Block

_BLOCK = re.compile(r"(\d+|\*)(x(\d+|\*))*")


def covers(b: int | None, size: Size) -> bool:
    """Whether one block of ``b`` elements is the whole axis."""
    # An empty axis has no block of `b` elements, but one whole-axis block: the grids differ.
    return b is None or (isinstance(size, int) and 0 < size <= b)


def is_whole(block: Block, shape: Sequence[Size]) -> bool:
    """Whether one scale covers a tensor of ``shape``."""
    return all(map(covers, block, shape))


def is_per_input(block: Block) -> bool:
    """Whether a weight ``[N, K]`` has one scale per input feature, shared by all outputs."""
    return block == (None, 1)


def rows_share_scale(block: Block, shape: Sequence[Size]) -> bool:
    """Whether every row (all axes but the last) has its own scale.

    The block size of an axis of static size 1 does not matter.
    """
    lead = zip(block[:-1], shape[:-1], strict=True)
    return covers(block[-1], shape[-1]) and all(b == 1 or same_size(s, 1) for b, s in lead)


def same_grid(a: Block, b: Block, shape: Sequence[Size]) -> bool:
    """Whether two blocks divide a shape in the same way."""
    return all(
        x == y or (covers(x, size) and covers(y, size))
        for x, y, size in zip(a, b, shape, strict=True)
    )


def fill_ones(block: Sequence[int | None], free: Sequence[bool]) -> Block:
    """Choose the block of size-1 axes, where 1 and the whole axis mean the same.

    It is 1 next to split axes and before the last axis, so that the block of a row stays
    ``1x1x*`` for any number of leading axes; otherwise it is the whole axis.
    """
    split = any(b is not None for b, f in zip(block, free, strict=True) if not f)
    last = len(block) - 1
    return tuple(
        (1 if split and axis != last else None) if f else b
        for axis, (b, f) in enumerate(zip(block, free, strict=True))
    )


def view_block(block: Block, before: Sequence[Size], after: Sequence[Size]) -> Block | Refusal:
    """Return the block after a tensor of shape ``before`` was viewed as ``after``.

    The view keeps the blocks and changes only the axes that index them. Blocks are in row-major
    order before and after, so the parameters are viewed the same way.

    Args:
        block: Elements that share a scale, per axis of ``before``.
        before: The shape, with as many elements as ``after``.
        after: The shape after the view.
    """
    if same_shape(before, after):
        return block
    if all(covers(b, size) for b, size in zip(block, before, strict=True)):
        return (None,) * len(after)
    # All products of sizes are 0 then, so runs of axes cannot be matched by them.
    if any(same_size(size, 0) for size in (*before, *after)):
        return Refusal("an empty tensor is viewed")
    done: list[int | None] = [None] * len(after)
    for ins, outs in _groups(before, after):
        found = _regroup(
            [block[i] for i in ins], [before[i] for i in ins], [after[j] for j in outs]
        )
        if isinstance(found, Refusal):
            return found
        for j, b in zip(outs, found, strict=True):
            done[j] = b
    return fill_ones(done, [same_size(size, 1) for size in after])


def _groups(before: Sequence[Size], after: Sequence[Size]) -> Iterator[tuple[list[int], list[int]]]:
    """Split two shapes into the shortest runs of axes with equally many elements.

    Axes of size 1 do not belong to a run. If symbols hide which run ends first, the rest is one
    run.
    """
    left = [i for i, size in enumerate(before) if not same_size(size, 1)]
    right = [j for j, size in enumerate(after) if not same_size(size, 1)]
    i = j = 0
    while i < len(left) and j < len(right):
        ins, outs = [left[i]], [right[j]]
        p, q = before[left[i]], after[right[j]]
        i, j = i + 1, j + 1
        # The side with fewer elements takes its next axis until both have equally many.
        while not same_size(p, q):
            if exact_quotient(q, p) is not None and i < len(left):
                p = p * before[left[i]]
                ins.append(left[i])
                i += 1
            elif exact_quotient(p, q) is not None and j < len(right):
                q = q * after[right[j]]
                outs.append(right[j])
                j += 1
            # Neither divides the other, as in `[6, 4] -> [4, 6]`; the run goes on to their common
            # product.
            elif isinstance(p, int) and isinstance(q, int) and p < q and i < len(left):
                p = p * before[left[i]]
                ins.append(left[i])
                i += 1
            elif isinstance(p, int) and isinstance(q, int) and q < p and j < len(right):
                q = q * after[right[j]]
                outs.append(right[j])
                j += 1
            else:
                ins += left[i:]
                outs += right[j:]
                i, j = len(left), len(right)
                break
        yield ins, outs
    if i < len(left) or j < len(right):
        yield left[i:], right[j:]


def _regroup(
    block: Sequence[int | None], before: Sequence[Size], after: Sequence[Size]
) -> Sequence[int | None] | Refusal:
    """Transfer the block of one run of axes: whole, per element, or contiguous chunks."""
    # The run has equally many elements on both sides, so this axis has the same size.
    if len(before) == 1 and len(after) == 1:
        return block
    if all(covers(b, size) for b, size in zip(block, before, strict=True)):
        return [None] * len(after)
    if all(b == 1 for b in block):
        return [1] * len(after)
    chunk = _chunk(block, before)
    return chunk if isinstance(chunk, Refusal) else _tile(chunk, after)


def _chunk(block: Sequence[int | None], sizes: Sequence[Size]) -> Size | Refusal:
    """Return how many consecutive elements in row-major order share a scale."""
    first = next(axis for axis, b in enumerate(block) if b != 1)
    inner = zip(block[first + 1 :], sizes[first + 1 :], strict=True)
    if not all(covers(b, size) for b, size in inner):
        return Refusal("elements that share a scale are not neighbours in memory order")
    chunk, size = block[first], sizes[first]
    if chunk is None or covers(chunk, size):
        count: Size = size
    # The next row would begin in the middle of a block: 5 columns in blocks of 4 give 4, 1, 4, 1.
    elif first > 0 and exact_quotient(size, chunk) is None:
        return Refusal("the last block of an axis is partial")
    else:
        count = chunk
    for inner_size in sizes[first + 1 :]:
        count = count * inner_size
    return count


def _tile(chunk: Size, sizes: Sequence[Size]) -> list[int | None] | Refusal:
    """Return the block that covers ``chunk`` consecutive elements."""
    done: list[int | None] = []
    rest = chunk
    for axis in reversed(range(len(sizes))):
        size = sizes[axis]
        inner = exact_quotient(rest, size)
        if same_size(rest, 1):
            done.append(1)
        elif inner is not None:
            done.append(None)
            rest = inner
        # Only along the outermost axis may the last block be partial, since nothing follows it.
        elif isinstance(rest, int) and (axis == 0 or exact_quotient(size, rest) is not None):
            done.append(rest)
            rest = 1
        else:
            return Refusal("blocks would not line up with the new axes")
    return done[::-1] if same_size(rest, 1) else Refusal("a block is larger than the tensor")


def block_grid(block: Block, shape: Sequence[Size]) -> tuple[Size, ...]:
    """Return the number of blocks along every axis of a tensor of ``shape``.

    Raises:
        BlockError: The rank of ``shape`` is not the rank of the block.
    """
    if len(shape) != len(block):
        raise BlockError(f"block {block} has another rank than the tensor {tuple(shape)}")
    return tuple(
        1 if b is None else (size + b - 1) // b for size, b in zip(shape, block, strict=True)
    )


def check_grid(block: Block, shape: Sequence[Size], scale_shape: Sequence[Size]) -> None:
    """Check that a scale of ``scale_shape`` tiles a tensor of ``shape``.

    Raises:
        BlockError: The shapes do not match.
    """
    want = block_grid(block, shape)
    if len(want) != len(scale_shape) or any(w != s for w, s in zip(want, scale_shape, strict=True)):
        raise BlockError(
            f"a scale of shape {tuple(scale_shape)} does not fit a tensor of shape "
            f"{tuple(shape)} in blocks of {block_text(block)}: it must be {want}",
            fix="give one scale per block, in the rank of the tensor",
        )


def block_text(block: Block) -> str:
    """Write a block as ``1x*``; a scalar's block is ``scalar``."""
    return "x".join("*" if b is None else str(b) for b in block) or "scalar"


def parse_block(text: str) -> Block:
    """Read the text of a block back.

    Raises:
        NormalizeError: The text is not a block.
    """
    if text == "scalar":
        return ()
    if _BLOCK.fullmatch(text) is None:
        raise NormalizeError(f"not the text of a block: {text!r}")
    return tuple(None if b == "*" else int(b) for b in text.split("x"))
