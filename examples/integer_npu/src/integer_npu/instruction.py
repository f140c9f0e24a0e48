"""Instructions: what one claimed node becomes, with all constants in integers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from integer_npu.fixed_point import INT32, fixed_point
from integer_npu.kernels import KERNELS, TABLE, Array
from qfuse.ir.ops.compact import CompactParams, compact_params
from qfuse.ir.ops.epilogue import ACTIVATIONS, Act, Add, Epilogue
from qfuse.ir.ops.views import QuantParams, shape_of, tensor_of
from qfuse.ir.quant.spec import QuantSpec, ZeroPointDomain
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import is_row_major, same_shape

_STORAGE = (torch.int8, torch.uint8)
# Bits below one step of the result, until all operands are added; a table has fewer of them, since
# its index has 16 bits.
_BITS, _TABLE_BITS = 8, 4


class RefusedError(Exception):
    """The node cannot become an instruction.

    Args:
        reason: Why, for the report.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
        name: The name of its kernel.
        operands: The nodes that it reads.
        constants: Its integers, by name.
        listed: Whether the node returns a list with one result.
    """

    name: str
    operands: tuple[Node, ...]
    constants: Mapping[str, Array]
    listed: bool = False

    def run(self, operands: Sequence[torch.Tensor]) -> Any:
        """Compute the result of the node."""
        arrays = [operand.detach().contiguous().numpy() for operand in operands]
        return run_instruction(self.name, self.constants, arrays, listed=self.listed)


def run_instruction(
    name: str, constants: Mapping[str, Array], operands: Sequence[Array], *, listed: bool
) -> Any:
    """Run one instruction on arrays; return a tensor, or a list with one."""
    result = torch.from_numpy(np.ascontiguousarray(KERNELS[name](constants, operands)))
    return [result] if listed else result


@dataclass(frozen=True, slots=True)
class Steps:
    """The parameters of one value, for integers.

    Attributes:
        scale: ``[1]``, or one per index of an axis, in float64: only used at compile time.
        zero: The zero points, as many.
        spec: Everything else.
    """

    scale: torch.Tensor
    zero: torch.Tensor
    spec: QuantSpec

    @property
    def dtype(self) -> Any:
        """The storage as numpy names it."""
        return np.int8 if self.spec.dtype is torch.int8 else np.uint8


def steps_of(params: QuantParams | None, what: str, axis: int | None = None) -> Steps:
    """Return the parameters of a value with one scale, or with one per index of ``axis``.

    Raises:
        RefusedError: It is float, or has other scales, storage or zero points.
    """
    if params is None:
        raise RefusedError(f"{what} is not quantized")
    spec = params.spec
    if spec.dtype not in _STORAGE or not spec.is_plain:
        raise RefusedError(f"{what} is not stored in 8-bit integers")
    if spec.domain is ZeroPointDomain.FLOAT_OFFSET:
        raise RefusedError(f"{what} has a zero point that is a float")
    if spec.float_dtype is not torch.float32:
        raise RefusedError(f"{what} stands for {spec.float_dtype}, whose roundings matter")
    if spec.rank == 0:
        raise RefusedError(f"{what} has no axis")
    found = compact_params(params, 0 if axis is None else axis)
    if isinstance(found, Refusal):
        raise RefusedError(f"{what}: {found.reason}")
    _check_group(found, what, axis)
    scale = found.scale.double()
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise RefusedError(f"{what} has a scale that is not positive and finite")
    zero = found.zero_point
    return Steps(scale, torch.zeros_like(scale).long() if zero is None else zero.long(), spec)


def _check_group(found: CompactParams, what: str, axis: int | None) -> None:
    if found.scale.numel() > 1 and axis is None:
        raise RefusedError(f"{what} has more than one scale")
    if found.group not in {None, 1}:
        raise RefusedError(f"{what} has scales in groups of {found.group}")


def check_layout(node: Node) -> None:
    """Refuse a result that is not row-major: the accelerator writes no other."""
    value = node.meta["val"]
    for part in value if isinstance(value, (list, tuple)) else (value,):
        if not is_row_major(part):
            raise RefusedError("its result is not row-major")


def check_sums(weight: torch.Tensor, x: Steps, bias: torch.Tensor) -> None:
    """Refuse sums that may leave int32."""
    info = torch.iinfo(x.spec.dtype)
    zero = int(x.zero)
    most = max(abs(info.min - zero), abs(info.max - zero))
    sums = weight.abs().flatten(1).sum(1) * most + bias.abs()
    if int(sums.max()) > INT32.max:
        raise RefusedError("its sums may not fit into 32 bits")


def integer_bias(bias: torch.Tensor | None, scale: torch.Tensor) -> torch.Tensor:
    """Round a bias to the step of the sums, which is the product of both scales."""
    if bias is None:
        return torch.zeros(scale.numel(), dtype=torch.int64)
    steps = (bias.double() / scale).round()
    if not bool((steps.abs() <= INT32.max).all()):
        raise RefusedError("its bias does not fit into 32 bits")
    return steps.long()


def finish(
    scale: torch.Tensor,
    out: Steps,
    epilogue: Epilogue,
    extras: tuple[Node, ...],
    result: Node,
) -> tuple[dict[str, Array], tuple[Node, ...]]:
    """Return the constants of what follows a sum, and the other operands.

    Args:
        scale: The step of the sum.
        out: The parameters of the result.
        epilogue: Sums with stored tensors, then at most one activation.
        extras: The operands of the epilogue.
        result: The node, for its shape.
    """
    adds = [step for step in epilogue.ops if isinstance(step, Add)]
    acts = epilogue.ops[len(adds) :]
    if tuple(adds) != epilogue.ops[: len(adds)] or len(acts) > 1:
        raise RefusedError(f"it has no instruction for {epilogue}")
    act = acts[0] if acts else None
    if act is not None and not isinstance(act, Act):
        raise RefusedError(f"it has no instruction for {epilogue}")
    bits = _TABLE_BITS if act is not None else _BITS if adds else 0
    step = float(out.scale) / 2**bits
    known: dict[str, Array] = {
        **_factors("", scale / step),
        "bits": np.array(bits),
        "range": np.array([out.spec.quant_min, out.spec.quant_max]),
        "out_zero": np.array(int(out.zero)),
        "like": np.zeros((), out.dtype),
    }
    for index, added in enumerate(adds):
        other = _added(added, extras, result)
        known |= _factors(str(index), added.alpha * other.scale / step)
        known[f"zero{index}"] = np.array(int(other.zero))
    if act is not None:
        known["table"] = _table(act, out, step)
    return known, tuple(extras[added.index] for added in adds)


def _added(step: Add, extras: tuple[Node, ...], result: Node) -> Steps:
    if step.stored is None:
        raise RefusedError("it adds a float tensor")
    operand, scale = extras[step.index], extras[step.stored.scale]
    zero = None if step.stored.zero_point is None else extras[step.stored.zero_point]
    value = result.meta["val"]
    shape = (value[0] if isinstance(value, (list, tuple)) else tensor_of(result)).shape
    if not same_shape(shape_of(operand), shape):
        raise RefusedError("an operand that it adds is broadcast")
    return steps_of(QuantParams(step.stored.spec, scale, zero), "an operand that it adds")


def _factors(name: str, factors: torch.Tensor) -> dict[str, Array]:
    found = fixed_point(factors.reshape(-1).tolist())
    if found is None:
        raise RefusedError("a factor between two scales does not fit into fixed point")
    return {f"multiplier{name}": found[0], f"shift{name}": found[1]}


def _table(act: Act, out: Steps, step: float) -> Array:
    """Return the result for every 16-bit value; refuse a table that 16 bits are too few for."""
    index = torch.arange(-TABLE, TABLE, dtype=torch.float64)
    table = _stored(act, index * step, out)
    # The index is rounded and saturated: the function must be smooth, and flat beyond the ends.
    beyond = torch.tensor([-1.0, 1.0]).double() * TABLE * 2.0 ** torch.arange(1, 9)[:, None]
    ends = _stored(act, beyond * step, out)
    flat = bool((ends == table[[0, -1]]).all())
    if not flat or bool((table.diff().abs() > 1).any()):
        raise RefusedError(f"the {act.name} is too steep for a table, or not flat at its ends")
    found: Array = table.numpy().astype(out.dtype)
    return found


def _stored(act: Act, x: torch.Tensor, out: Steps) -> torch.Tensor:
    """Apply an activation and quantize."""
    y = ACTIVATIONS[act.name](x, *act.args)
    stored = (y / out.scale).round() + out.zero
    return stored.clamp(out.spec.quant_min, out.spec.quant_max).long()
