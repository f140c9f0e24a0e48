"""Compare the values of a whole model with the captured graph, within the graph's own noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from qfuse.ir.dtypes import BYTES, COMPUTE_DTYPES
from qfuse.ir.errors import CheckError
from qfuse.ir.events import Exactness
from qfuse.ir.graph.schema import overload_of
from qfuse.ir.graph.stage_graph import StageGraph
from qfuse.rewrite.compare import Verdict, compare
from qfuse.rewrite.tolerance import MODEL
from qfuse.targets import Target

_RUNS = 3
# About one quantized value in this many lies within float32 noise of a tie. At least one per tensor
# is flipped, so that small tensors are perturbed too.
_CODES_PER_FLIP = 100_000
# Random numbers beyond the largest tensor: each tensor begins at another one of them.
_OFFSETS = 65_536
# A sum of so many products of int8 values is at most 2**24, and exact in float32 in any order.
_EXACT_DEPTH = 1024


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """The captured graph's outputs on the example inputs, and the effect of its own rounding.

    Attributes:
        outputs: The flat outputs, mutated values first.
        noise: Per output, the greatest deviation when every result is perturbed by the rounding
            of its own dtype. It is measured, since dynamic quantization amplifies rounding errors.
    """

    outputs: tuple[Any, ...]
    noise: tuple[Any, ...]

    @classmethod
    def measure(
        cls,
        program: StageGraph,
        inputs: Sequence[torch.Tensor],
        float_dtype: torch.dtype | None = None,
    ) -> ModelCheck:
        """Run the captured graph unchanged, and a few times with perturbed results.

        Args:
            program: The captured graph.
            inputs: The flat inputs.
            float_dtype: The requested dtype for matmuls; the perturbation is then at least its
                rounding error.
        """
        by_floats = _multiplies_in_floats(program.module)
        outputs = _run(_Exact(program.module, by_floats), inputs)
        noise = [
            torch.zeros(o.shape).double() if isinstance(o, torch.Tensor) else None for o in outputs
        ]
        for seed in range(_RUNS):
            shaken = _run(_Shaken(program.module, by_floats, seed, float_dtype), inputs)
            for index, (o, s) in enumerate(zip(outputs, shaken, strict=True)):
                known = noise[index]
                # A size that depends on values, as of `unique`, may differ: it tells no noise.
                if known is not None and s.shape == o.shape:
                    apart = (s.double() - o.double()).abs()
                    # Infinities and NaNs have no noise: the rewritten model must reproduce them.
                    apart = torch.where(apart.isfinite(), apart, torch.zeros_like(apart))
                    noise[index] = torch.maximum(known, apart)
        return cls(outputs, tuple(noise))

    def unkept(self, wrong: str, program: StageGraph, inputs: Sequence[torch.Tensor]) -> CheckError:
        """Return the error of values that differ with every rewrite undone.

        Args:
            wrong: How they differ.
            program: The captured graph. It is run again: it may not repeat its own values.
            inputs: The flat inputs.
        """
        by_floats = _multiplies_in_floats(program.module)
        again = self.judge(_run(_Exact(program.module, by_floats), inputs)).wrong
        if again is None:
            return CheckError(
                f"the model returns other values with every rewrite undone: {wrong}",
                fix="this is a bug of qfuse; please report it with the model",
            )
        return CheckError(
            f"the model itself returns other values when it is called again: {again}",
            fix="find the op that does: `qfuse doctor` lists ops of torch that read uninitialized "
            "memory on this machine; for a model that has to vary, check='off' compiles it",
        )

    def judge(self, outputs: Sequence[Any], exactness: Exactness = Exactness.ROUNDING) -> Verdict:
        """Compare the outputs of a rewritten graph, mutated values first.

        Returns:
            The first verdict that fails, or the one closest to failing.
        """
        nearest = Verdict(None)
        known = zip(self.outputs, self.noise, strict=True)
        for index, (new, (old, noise)) in enumerate(zip(outputs, known, strict=True)):
            if not isinstance(old, torch.Tensor):
                continue
            found = compare(new, old, None, exactness, MODEL, noise)
            if found.wrong is not None:
                return Verdict(f"output {index}: {found.wrong}", found.error, found.allowed)
            nearest = max(nearest, found, key=_share)
        return nearest


def _share(verdict: Verdict) -> float:
    """Return the error as a share of the tolerance; 0 for bitwise equal outputs."""
    return verdict.error / verdict.allowed if verdict.allowed else 0.0


def bisect_count(count: int, holds: Callable[[int], bool]) -> int:
    """Return the least number of rewrites after which values are wrong.

    Args:
        count: The number of rewrites; with all of them values are wrong.
        holds: Whether values are right after the first ``n`` rewrites.
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return high


class _Exact(Interpreter):
    """Runs a graph with integer products that are correct and fast on every machine."""

    def __init__(self, module: GraphModule, by_floats: bool) -> None:
        super().__init__(module)
        self._by_floats = by_floats

    def run_node(self, n: Node) -> Any:
        if _is_int_mm(n):
            left, right = self.fetch_args_kwargs_from_env(n)[0]
            # With a size of 1 the result of `_int_mm` may be garbage.
            if left.device.type == "cpu" and (self._by_floats or 1 in (*left.shape, *right.shape)):
                return int_product(left, right)
        return super().run_node(n)


class _Shaken(_Exact):
    """Runs a graph with rounding errors that another order of operations could have made.

    Every float result is multiplied by ``1 + eps * u`` with ``u`` in [-1, 1], and a few values
    of every quantized tensor move by one step, as values next to a tie do. Views are unchanged.

    The random numbers are drawn once, as many as the largest tensor needs and some more; each
    tensor takes them from another place on.
    """

    def __init__(
        self, module: GraphModule, by_floats: bool, seed: int, float_dtype: torch.dtype | None
    ) -> None:
        super().__init__(module, by_floats)
        self._random = torch.Generator().manual_seed(seed)
        self._least = torch.finfo(float_dtype).eps if float_dtype is not None else 0.0
        self._numbers = torch.empty(0)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        op = overload_of(n)
        if op is None or op.is_view:
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self._shake(v, n) for v in value)
        return self._shake(value, n)

    def _shake(self, value: Any, node: Node) -> Any:
        if _is_float(value):
            return self._perturb(value)
        if isinstance(value, torch.Tensor) and value.dtype in BYTES and _quantizes(node):
            return self._flip(value)
        return value

    def _perturb(self, value: torch.Tensor) -> torch.Tensor:
        """Multiply by ``1 + eps * u`` and round once to the dtype of ``value``."""
        info = torch.finfo(value.dtype)
        wide = value if value.dtype is torch.float64 else value.float()
        # The product is small, so its own rounding does not count.
        unit = max(info.eps, self._least)
        shaken = torch.addcmul(wide, wide, self._draw(wide), value=unit).to(value.dtype)
        # A sum is finite only if all of its terms are.
        if not bool(shaken.sum(dtype=wide.dtype).isfinite()):
            # A mask made of the lowest finite value must not become an infinity.
            shaken = torch.where(value.isfinite(), shaken.clamp(info.min, info.max), value)
        return shaken

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        """Return random numbers in [-1, 1], with the shape and layout of ``like``."""
        layout = torch.empty_like(like, device="meta")
        count = layout.numel()
        if self._numbers.numel() < count + _OFFSETS:
            size = count + _OFFSETS
            self._numbers = torch.empty(size).uniform_(-1, 1, generator=self._random)
        last = self._numbers.numel() - count
        begin = int(torch.randint(last + 1, (), generator=self._random))
        drawn = self._numbers.as_strided(layout.shape, layout.stride(), begin)
        return drawn.to(like)

    def _flip(self, codes: torch.Tensor) -> torch.Tensor:
        """Move a few quantized values by one step, towards the middle of the tensor's range.

        If all are equal, they move up, or down from the dtype's greatest value.
        """
        count = min(codes.numel(), 1 + codes.numel() // _CODES_PER_FLIP)
        where = torch.randint(max(codes.numel(), 1), (count,), generator=self._random)
        flipped = codes.flatten().clone()
        here = flipped[where].to(torch.int32)
        low, high = (int(end) for end in torch.aminmax(codes)) if codes.numel() else (0, 0)
        middle = (low + high) // 2
        down = (here > middle) | (here == torch.iinfo(codes.dtype).max)
        flipped[where] = (here + torch.where(down, -1, 1)).to(codes.dtype)
        return flipped.reshape(codes.shape)


def int_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` of int8 matrices in int32, computed exactly by float matmuls.

    Args:
        left: Shape ``[M, K]``.
        right: Shape ``[K, N]``.
    """
    total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.int32, device=left.device)
    lefts, rights = torch.split(left, _EXACT_DEPTH, 1), torch.split(right, _EXACT_DEPTH, 0)
    for some, others in zip(lefts, rights, strict=True):
        total += (some.float() @ others.float()).to(torch.int32)
    return total


def _is_int_mm(node: Node) -> bool:
    return node.target is torch.ops.aten._int_mm.default


def _multiplies_in_floats(module: GraphModule) -> bool:
    """Whether floats multiply faster: without 8-bit dot products `_int_mm` is a loop."""
    return any(map(_is_int_mm, module.graph.nodes)) and not _has_int8_dot()


def _has_int8_dot() -> bool:
    return Target.detect(extensions=False).has_exact_onednn


def _quantizes(node: Node) -> bool:
    return any(_is_float(n.meta.get("val")) for n in node.all_input_nodes)


def _run(interpreter: Interpreter, inputs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    # The graph has every cast of its source; an ambient autocast would round integer products.
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        # The graph is functional, but an output may alias a constant or an input.
        return tuple(
            o.detach().clone() if isinstance(o, torch.Tensor) else o
            for o in interpreter.run(*inputs)
        )


def _is_float(value: object) -> bool:
    """Whether a value has a dtype of float arithmetic; 8-bit floats are quantized values."""
    return isinstance(value, torch.Tensor) and value.dtype in COMPUTE_DTYPES
