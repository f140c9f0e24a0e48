"""torchao's ``block_size``, dtypes and ranges, with torchao's semantics."""

from __future__ import annotations

import torch
from torch.fx.node import Argument

from qfuse.ir.errors import BlockError
from qfuse.ir.ops.value_range import Bounds
from qfuse.ir.ops.views import shape_of
from qfuse.ir.quant.spec import Block, dtype_name, dtype_range
from qfuse.ir.sizes import Size, element_count, same_size, sizes_of
from qfuse.normalize.importers.errors import cannot_run
from qfuse.normalize.importers.qdq import quant_range
from qfuse.normalize.importers.rule import RefusedError
from qfuse.rewrite.prelude import MissCode, Node

# Sub-byte dtypes of torch have no arithmetic; the values are stored in bytes.
_UNSIGNED = {getattr(torch, f"uint{bits}"): bits for bits in range(1, 8)}
_SIGNED = {getattr(torch, f"int{bits}"): bits for bits in range(1, 8)}
_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32)
_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_unsigned_sub_byte(dtype: torch.dtype) -> bool:
    """Whether ``dtype`` is one that torchao stores in bytes without checking their dtype."""
    return dtype in _UNSIGNED


def storage_of(
    node: Node, dtype: torch.dtype, low: Argument, high: Argument
) -> tuple[torch.dtype, Bounds]:
    """Return the dtype and the range of the quantized values.

    The default range is that of the dtype; a dtype with fewer than eight bits is stored in bytes.

    Raises:
        NormalizeError: The range exceeds the dtype, or torchao does not support the dtype.
        RefusedError: It is not a range of integers.
    """
    if dtype in _UNSIGNED:
        stored, ends = torch.uint8, (0, 2 ** _UNSIGNED[dtype] - 1)
    elif dtype in _SIGNED:
        half = 2 ** (_SIGNED[dtype] - 1)
        stored, ends = torch.int8, (-half, half - 1)
    elif dtype in _WHOLE or dtype in _FLOATS:
        stored, ends = dtype, dtype_range(dtype)
    else:
        raise cannot_run(node, f"torchao does not quantize to {dtype_name(dtype)}")
    codes = quant_range(node, ends[0] if low is None else low, ends[1] if high is None else high)
    if codes[0] < ends[0] or codes[1] > ends[1]:
        raise cannot_run(node, f"the range {list(codes)} exceeds {dtype_name(dtype)} {list(ends)}")
    return stored, codes


def canonical_block(node: Node, data: Node, block_size: Argument) -> Block:
    """Return torchao's block in the canonical form: ``None`` for a whole axis.

    Raises:
        BlockError: Blocks do not tile the data.
        RefusedError: It is not known whether they do.
    """
    shape, sizes = shape_of(data), sizes_of(block_size)
    if sizes is None:
        raise RefusedError(
            MissCode.ARGUMENT, node, "block_size is not a list of sizes: {}", block_size
        )
    if len(sizes) != len(shape):
        raise cannot_run(
            node,
            f"a block of {tuple(sizes)} has another rank than data of shape {tuple(shape)}",
            kind=BlockError,
        )
    return tuple(_axis(node, size, b) for size, b in zip(shape, sizes, strict=True))


def check_reduces(node: Node, x: Node, block: Block) -> None:
    """Check that a block reduces some axis: without axes to reduce, torch reduces all of them.

    Raises:
        RefusedError: It does not.
    """
    # torch reduces all axes for an empty list of them: `amax(x, [])` is one number.
    if all(b == 1 for b in block) and element_count(shape_of(x)) != 1:
        text = "a block of ones reduces the whole tensor of shape {}"
        raise RefusedError(MissCode.GRANULARITY, node, text, shape_of(x))


def _axis(node: Node, size: Size, block: Size) -> int | None:
    if isinstance(block, int) and block == 1:
        return 1
    # torchao uses -1 for the whole axis, and treats any value not above 1 alike.
    if same_size(block, size) or (isinstance(block, int) and block == -1):
        return None
    if not isinstance(block, int) or not isinstance(size, int):
        text = "it is not known before run time whether blocks of {} tile an axis of {}"
        raise RefusedError(MissCode.SHAPE, node, text, block, size)
    if block < 1 or size % block:
        raise cannot_run(node, f"blocks of {block} do not tile an axis of {size}", kind=BlockError)
    return block
