"""Attention of float values, on qfuse's own kernel."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch

from qfuse.ir.aten import aten
from qfuse.ir.dtypes import FLOATS
from qfuse.ir.events import Fired, Noted, Place
from qfuse.ir.graph.schema import arguments, is_call
from qfuse.ir.graph.stage_graph import CLAIM_META, SITE_META, place_of, site_of
from qfuse.ir.ops.view_ops import SIZED_VIEWS
from qfuse.ir.ops.views import dtype_of, node_of, shape_of, tensor_of
from qfuse.ir.quant.spec import dtype_name
from qfuse.ir.refusal import Refusal
from qfuse.ir.sizes import (
    Size,
    broadcast_shape,
    exact_quotient,
    is_row_major,
    same_shape,
    same_size,
)
from qfuse.kernels.matmul_ops import GREATEST_SCALE, mask_dtypes
from qfuse.lower.floats.masks import without_allowing_parts
from qfuse.lower.operands.own_kernel import has_own_kernels
from qfuse.lower.select.context import LoweringContext
from qfuse.rewrite.prelude import Exactness, Node, Rewriter
from qfuse.rewrite.repeat_view import repeat_view, viewed
from qfuse.targets.target import Target

_NAME = "lower-attention"
_AXES = 4
# So many need less time for products than for reading the keys, with vectors of float32 too.
_FEW_QUERIES = 4


def lower_attention(context: LoweringContext) -> None:
    """Replace ``scaled_dot_product_attention`` by the kernel, or note why torch keeps it.

    torch multiplies with MKL, a piece of the queries and keys at a time. MKL has no AVX512 on
    processors of AMD, and short sequences give it small products. In bfloat16 and float16 torch is
    no faster than in float32, and for few queries much slower, except where oneDNN has
    instructions for their products (ADR 47).
    docs/kernels.md has the times, which are with vectors of at least 8 floats.
    """
    target = context.target
    if not target.has("avx2") or not has_own_kernels(context.kernels, target):
        return
    for node in list(context.program.graph.nodes):
        call = _call_of(node)
        if call is None:
            continue
        refusal = call.refusal(target)
        if refusal is not None:
            text = f"attention is left to torch's kernel: {refusal.reason}"
            context.program.log.add(Noted(context.stage, text, place_of(node)))
            continue
        context.session.rewrite(
            _NAME,
            node,
            call.replace,
            proof=Exactness.ROUNDING,
            event=partial(_fired, context.stage, place_of(node)),
        )


def _fired(stage: str, place: Place, key: str, rw: Rewriter, made: Node) -> Fired:
    del rw
    return Fired(stage, _NAME, key, Exactness.ROUNDING, (place,), (made.name,))


def _are_few(rows: Size) -> bool:
    return isinstance(rows, int) and rows <= _FEW_QUERIES


def _is_fast_in_torch(dtype: torch.dtype, target: Target) -> bool:
    if dtype is torch.bfloat16:
        return target.has_onednn_amx
    return dtype is torch.float16 and (target.has("avx512_fp16") or target.has("amx_fp16"))


def _call_of(node: Node) -> _Call | None:
    if not is_call(node, aten.scaled_dot_product_attention.default) or CLAIM_META in node.meta:
        return None
    a = arguments(node)
    mask, dropout = a["attn_mask"], a["dropout_p"]
    query = node_of(a["query"])
    features = shape_of(query)[-1]
    scale = a["scale"]
    if scale is None and isinstance(features, int) and features:
        scale = features**-0.5
    return _Call(
        node=node,
        query=query,
        key=node_of(a["key"]),
        value=node_of(a["value"]),
        mask=None if mask is None else node_of(mask),
        scale=float(scale) if isinstance(scale, (int, float)) else 0.0,
        causal=bool(a["is_causal"]),
        may_share=bool(a["enable_gqa"]),
        drops=not isinstance(dropout, (int, float)) or dropout != 0.0,
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of torch's op.

    Attributes:
        node: The call.
        query: Queries, as ``key`` and ``value`` with four axes if the kernel covers them.
        key: Keys.
        value: Values.
        mask: What is added to the scores, or which of them count; ``None`` if there is none.
        scale: Of the scores; 0 if it is not a number.
        causal: Whether a query has only the keys up to its own position.
        may_share: Whether several heads of queries may have the same keys.
        drops: Whether there is dropout.
    """

    node: Node
    query: Node
    key: Node
    value: Node
    mask: Node | None
    scale: float
    causal: bool
    may_share: bool
    drops: bool

    def refusal(self, target: Target) -> Refusal | None:
        """Why torch computes this call; ``None`` if the kernel does."""
        if self.drops:
            return Refusal("it has dropout")
        if not 0 < c_float(self.scale).value <= GREATEST_SCALE:
            return Refusal("its scale is not known to be positive and at most 2^127")
        return self._refused_operands(target) or self._refused_sizes() or self._refused_mask()

    def _refused_operands(self, target: Target) -> Refusal | None:
        parts = (self.query, self.key, self.value)
        given = parts if self.mask is None else (*parts, self.mask)
        dtype = dtype_of(self.query)
        name = dtype_name(dtype)
        if any(tensor_of(part).device.type != "cpu" for part in given):
            return Refusal("its operands are on other devices")
        if any(dtype_of(part) is not dtype for part in parts):
            return Refusal("its operands have different dtypes")
        if dtype not in FLOATS:
            return Refusal(f"it computes in {name}")
        rows = shape_of(self.query)[-2:-1]
        if _is_fast_in_torch(dtype, target) and not (rows and _are_few(rows[0])):
            return Refusal(f"torch has instructions for products of {name}")
        if any(len(shape_of(part)) != _AXES for part in parts):
            return Refusal(f"its operands have other than {_AXES} axes")
        return None

    def _refused_sizes(self) -> Refusal | None:
        query, key, value = map(shape_of, (self.query, self.key, self.value))
        batch, heads, _, depth = query
        shared, width = key[1], value[3]
        if not all(isinstance(size, int) and size for size in (heads, depth, shared, width)):
            return Refusal("its heads or features are dynamic or none")
        fits = (
            same_size(batch, key[0])
            and same_shape(key[:3], value[:3])
            and same_size(depth, key[3])
            and (same_size(heads, shared) or (self.may_share and exact_quotient(heads, shared)))
        )
        if not fits:
            return Refusal("its operands broadcast, or their sizes are not known to fit")
        if self.order is None:
            return Refusal("its result does not have features innermost, without gaps")
        return None

    def _refused_mask(self) -> Refusal | None:
        if self.mask is None:
            return None
        if self.causal:
            return Refusal("it is causal and has a mask")
        dtype, mask = dtype_of(self.mask), shape_of(self.mask)
        if dtype not in mask_dtypes(dtype_of(self.query)):
            return Refusal(f"its mask is {dtype_name(dtype)}")
        whole = (*shape_of(self.query)[:3], shape_of(self.key)[2])
        shape = broadcast_shape(mask, whole)
        if not 1 < len(mask) <= _AXES or shape is None or not same_shape(shape, whole):
            return Refusal("its mask does not have the axes of the scores")
        return None

    @property
    def order(self) -> list[int] | None:
        """The axes of the result but the last one, from the outermost in memory."""
        result = tensor_of(self.node)
        orders = permutations(range(_AXES - 1))
        found = (list(o) for o in orders if is_row_major(result.permute(*o, _AXES - 1)))
        return next(found, None)

    def replace(self, rw: Rewriter) -> Node:
        """Call the kernel instead, and return the call."""
        uncopied: dict[Node, Node] = {}
        made = rw.call(
            torch.ops.qfuse.attention.default,
            *(
                *(_without_copy(x, uncopied, rw) for x in (self.query, self.key, self.value)),
                None if self.mask is None else without_allowing_parts(self.mask),
                self.causal,
                self.scale,
                self.order,
            ),
        )
        made.meta[SITE_META] = site_of(self.node)
        rw.replace(self.node, made)
        return made


def _without_copy(operand: Node, made: dict[Node, Node], rw: Rewriter) -> Node:
    """Return an operand without copies of its heads: the kernel reads any strides.

    Args:
        operand: Queries, keys or values.
        made: The same views of uncopied values, which are added to.
        rw: The edit.
    """
    views, source = [], operand
    while (below := viewed(source)) is not None:
        views.append(source)
        source = below
    # Views to a size may need the strides of the copy.
    if not is_call(source, aten.clone.default) or any(is_call(v, *SIZED_VIEWS) for v in views):
        return operand
    found = _without_copy(node_of(arguments(source)["self"]), made, rw)
    for view in reversed(views):
        if view not in made:
            made[view] = repeat_view(view, found, rw)
        found = made[view]
    return found
