"""Scaled dot-product attention with quantized queries, keys and values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.fx import Node

from qfuse.ir.errors import NormalizeError
from qfuse.ir.ops.declare import Op, define_op
from qfuse.ir.ops.views import QuantParams, dtype_of, shape_of
from qfuse.ir.sizes import Size, broadcast_shape, exact_quotient, same_shape, same_size

_TEXT = re.compile(r"(?P<kind>full|causal)( scale=(?P<scale>\S+))?(?P<grouped> grouped)?")
_MATRIX = 2
_HEADS = -3


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Everything about an attention except its tensors.

    Attributes:
        causal: Whether a query sees only the keys up to its own position.
        scale: The factor of the products of queries and keys; ``None`` is one over the root of
            their width.
        grouped: Whether several heads of queries share one head of keys and values
            (``enable_gqa``).
    """

    causal: bool = False
    scale: float | None = None
    grouped: bool = False

    def __str__(self) -> str:
        parts = ["causal" if self.causal else "full"]
        parts += [] if self.scale is None else [f"scale={self.scale!r}"]
        return " ".join((*parts, "grouped") if self.grouped else parts)

    @classmethod
    def parse(cls, text: str) -> AttentionSpec:
        """Parse the canonical text.

        >>> AttentionSpec.parse("causal scale=0.125 grouped").scale
        0.125

        Raises:
            NormalizeError: The text is not an attention.
        """
        found = _TEXT.fullmatch(text)
        if found is None:
            raise NormalizeError(f"not the text of an attention: {text!r}")
        try:
            scale = None if found["scale"] is None else float(found["scale"])
        except ValueError as error:
            raise NormalizeError(f"not the text of an attention: {text!r}") from error
        return cls(found["kind"] == "causal", scale, found["grouped"] is not None)


@define_op("scaled_dot_product_attention")
@dataclass(frozen=True, slots=True)
class Attention(Op):
    """A ``qfuse::scaled_dot_product_attention`` call: ``softmax(q @ k.mT * scale + mask) @ v``.

    ``query`` is ``[*batch, L, E]``, ``key`` ``[*batch, S, E]`` and ``value`` ``[*batch, S, D]``.
    The weights that multiply the values are float. ``mask`` broadcasts to ``[*batch, L, S]``:
    bools say which keys are seen, floats are added. Without quantization parameters an operand is
    float, and so is the result. Backends claim it; what none claims is expanded.
    """

    query: Node
    query_params: QuantParams | None
    key: Node
    key_params: QuantParams | None
    value: Node
    value_params: QuantParams | None
    mask: Node | None
    out_params: QuantParams | None
    attention: AttentionSpec

    @staticmethod
    def reference(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        attention: AttentionSpec,
    ) -> torch.Tensor:
        """Compute the attention in float, by the call that the source makes."""
        # A causal mask that torch makes is fake where the operands are: their sizes may be symbols.
        with getattr(query, "fake_mode", None) or nullcontext():
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=mask,
                is_causal=attention.causal,
                scale=attention.scale,
                enable_gqa=attention.grouped,
            )

    def problems(self) -> Iterator[str]:
        """Check dtypes and shapes of the operands, as torch does."""
        operands = (self.query, self.query_params), (self.key, self.key_params)
        kinds = [_float_dtype(*one) for one in (*operands, (self.value, self.value_params))]
        if len(set(kinds)) > 1:
            yield f"queries, keys and values are {', '.join(map(str, kinds))}"
        known = {torch.bool, torch.float32, kinds[0]}
        if self.mask is not None and dtype_of(self.mask) not in known:
            yield f"a mask of {dtype_of(self.mask)} for queries of {kinds[0]}"
        if self.mask is not None and self.attention.causal:
            yield "a mask, and a causal mask"
        yield from self._wrong_shapes()

    def _wrong_shapes(self) -> Iterator[str]:
        query, key, value = map(shape_of, (self.query, self.key, self.value))
        least = -_HEADS if self.attention.grouped else _MATRIX
        if min(map(len, (query, key, value))) < least:
            yield f"operands of rank {len(query)}, {len(key)} and {len(value)}"
            return
        rows, keys, width = query[-2], key[-2], value[-1]
        batch = self._batch(query, key, value)
        fits = same_size(query[-1], key[-1]) and same_size(keys, value[-2])
        if batch is None or not fits:
            shapes = ", ".join(str(tuple(shape)) for shape in (query, key, value))
            yield f"queries, keys and values of shapes {shapes}"
            return
        if self.mask is not None:
            scores = (*batch, rows, keys)
            masked = broadcast_shape(scores, shape_of(self.mask))
            # A mask with more rows or batches than the scores does not make them more.
            if masked is None or not same_shape(masked, scores):
                yield f"a mask of shape {tuple(shape_of(self.mask))} for scores of {scores}"
        if not same_shape((*batch, rows, width), shape_of(self.node)):
            yield f"a result of shape {tuple(shape_of(self.node))}"

    def _batch(self, *shapes: Sequence[Size]) -> tuple[Size, ...] | None:
        """Return the batch axes of the result, ``None`` if operands do not broadcast."""
        query = shapes[0]
        batch: tuple[Size, ...] | None = tuple(query[:-_MATRIX])
        for shape in shapes[1:]:
            lead = list(shape[:-_MATRIX])
            if self.attention.grouped:
                # Every head of keys and values is there for as many heads of queries.
                if exact_quotient(query[_HEADS], shape[_HEADS]) is None:
                    return None
                lead[-1] = query[_HEADS]
            batch = None if batch is None else broadcast_shape(batch, lead)
        return batch


def _float_dtype(operand: Node, params: QuantParams | None) -> torch.dtype:
    return dtype_of(operand) if params is None else params.spec.float_dtype


as_attention = Attention.of
