"""The reasons why products, quantizes and dequantizes run as they do."""

from __future__ import annotations

from collections.abc import Iterator

from qfuse.ir.events import Estimated, Event, Left, Lowered, MissCode, Missed, Noted, Place
from qfuse.ir.recurrent import RECURRENT_NAMES
from qfuse.report.advice import LOOKED_UP, OF_A_MODULE, OF_AN_EINSUM, Cause, advice_for
from qfuse.report.misses import closest, explains_input, merges
from qfuse.report.work import kernels_of, seconds_of

_OTHER_ACTIVATIONS = ("the activation is quantized", "the activation is not quantized")


class Causes:
    """Matches what was not fused with the reasons."""

    def __init__(self, events: list[Event]) -> None:
        self._events = events
        self._kernels = kernels_of(events)
        missed = [e for e in events if isinstance(e, Missed)]
        self._misses = closest(missed)
        self._unfused = closest(miss for miss in missed if not merges(miss))
        self._estimates = {e.place.node: e for e in events if isinstance(e, Estimated)}
        self._lowered = {e.place.node: e for e in events if isinstance(e, Lowered)}
        self._left = {e.place.node: e for e in events if isinstance(e, Left)}
        # A note that says what to do is an action of its own.
        self._warned = {
            e.place.node: e
            for e in events
            if isinstance(e, Noted) and e.warn and e.place and not e.do
        }
        self._dequantized = {
            e.place.source
            for e in self._left.values()
            if e.place.op.endswith(".dequantize") and e.place.source and not e.needed
        }
        self._explained: set[str] = set()
        self._readers: dict[str, list[Estimated]] = {}
        for estimate in self._estimates.values():
            for name in estimate.upstream:
                self._readers.setdefault(name, []).append(estimate)
        # The products whose cost is part of a cause.
        self._charged: set[str] = set()

    def all(self) -> Iterator[tuple[Cause, Place, float | None]]:
        """Yield every cause with its place and its predicted cost."""
        for estimate in self._estimates.values():
            found = self._product(estimate)
            if found is not None:
                yield found
        for left in self._left.values():
            if left.place.node not in self._explained and self._is_waste(left):
                yield self._quantize(left)
        for note in self._warned.values():
            assert note.place is not None, "only notes with a place are kept"
            if note.place.node not in self._explained:
                yield Cause(None, "import", note.text), note.place, self._cost(note.place.node)
        for node, miss in self._misses.items():
            told = explains_input(miss) and not self._is_recognized(node)
            if node not in self._explained and (told or advice_for(_missed(miss))):
                yield _missed(miss), miss.anchor, self._cost(node) or self._lost(miss.anchor)

    def _cost(self, node: str) -> float | None:
        """Return what the products that read a node lose, or else the time of the node itself.

        A product that a kernel multiplies in float loses the difference to its time on integers.
        """
        lost, own = 0.0, self._estimates.get(node)
        for product in self._readers.get(node, ()):
            kernel = self._kernels.get(product.place.node)
            floats = kernel is None or kernel.weight_only
            if (
                floats
                and product.int8_seconds is not None
                and product.place.node not in self._charged
            ):
                self._charged.add(product.place.node)
                lost += max(seconds_of(product, kernel) - product.int8_seconds, 0.0)
        if lost or own is None or own.int8_seconds is not None:
            return lost or None
        return own.float_seconds

    def _lost(self, place: Place) -> float | None:
        """Return what the product at a place loses because its kernel reads floats.

        A product has another node when it is fused. Of several in one line, it is not known which.
        """
        here = [
            estimate
            for estimate in self._estimates.values()
            if (estimate.place.source, estimate.place.module) == (place.source, place.module)
            and estimate.int8_seconds is not None
        ]
        kernel = self._kernels.get(here[0].place.node) if len(here) == 1 else None
        if kernel is None or not kernel.weight_only or here[0].place.node in self._charged:
            return None
        assert here[0].int8_seconds is not None, "it is a product"
        return max(seconds_of(here[0], kernel) - here[0].int8_seconds, 0.0) or None

    def unquantized(self) -> Iterator[tuple[Cause, Place]]:
        """Yield the quantized ops that run in float, and not because that is faster.

        They are the products that read something quantized, and what was not imported. An op of
        another kind, such as a pool behind a dequantize, computes in float as its source does.
        """
        for product in self._estimates.values():
            lowered = self._lowered.get(product.place.node)
            stray = {name for name in product.upstream if self._is_stray(name)}
            if product.int8_seconds is None or product.place.node in self._kernels:
                continue
            if lowered.failed if lowered is not None else stray and not self._pays(product.place):
                yield self._why(product, lowered), product.place
        for left in self._left.values():
            cause = self._of_left(left)
            advice = advice_for(cause)
            # An `einsum` or a sum of products is a product too, but its size is not estimated.
            multiplied = advice is not None and advice.name in {LOOKED_UP, OF_AN_EINSUM}
            if multiplied and left.place.node not in self._readers:
                yield cause, left.place
        for note in self._warned.values():
            assert note.place is not None, "only notes with a place are kept"
            if note.stage == "normalize":
                yield Cause(None, "import", note.text), note.place

    def _is_recognized(self, node: str) -> bool:
        """Whether a node quantizes for another quantized op, whatever computes its scale."""
        left = self._left.get(node)
        return left is not None and left.needed

    @staticmethod
    def _of_left(left: Left) -> Cause:
        op = left.place.op.rpartition(".")[2]
        return Cause(None, f"left {op}", left.reason)

    def _is_waste(self, left: Left) -> bool:
        """Whether the op is left and not needed; a quantize goes with its dequantize."""
        op = left.place.op
        if op.endswith(".requantize"):
            return True
        alone = not op.endswith(".quantize") or left.place.source not in self._dequantized
        return not left.needed and alone

    def _is_stray(self, name: str) -> bool:
        return name in self._left and not self._left[name].needed

    def _pays(self, place: Place) -> bool:
        """Whether a rule was legal there and did not pay."""
        miss = self._unfused.get(place.node)
        return miss is not None and miss.code is MissCode.PROFIT

    def _product(self, product: Estimated) -> tuple[Cause, Place, float | None] | None:
        """Return why a product does not run on a quantized kernel, if that costs something."""
        node = product.place.node
        lowered = self._lowered.get(node)
        kernel = self._kernels.get(node)
        if product.int8_seconds is None or (kernel is not None and not kernel.dequantized):
            return None
        upstream = [name for name in product.upstream if name in self._left]
        passes = sum(self._estimates[name].float_seconds for name in upstream)
        cost = seconds_of(product, kernel) + passes - product.int8_seconds
        self._explained.update(upstream, product.upstream, () if kernel else (node,))
        # The cost model prefers float here, so nothing is lost.
        chosen = lowered is not None and not (lowered.failed or lowered.dequantized)
        if cost <= 0 or chosen:
            return None
        return self._why(product, lowered), product.place, cost

    def _why(self, product: Estimated, lowered: Lowered | None) -> Cause:
        if lowered is not None:
            return _closest_kernel(lowered)
        for name in product.upstream:
            if name in self._warned:
                return Cause(None, "import", self._warned[name].text)
        own = self._unfused.get(product.place.node)
        inputs = [self._misses[name] for name in product.upstream if name in self._misses]
        inputs = [miss for miss in inputs if explains_input(miss)]
        # A weight that is computed by a chain that was not recognized only looks like a float.
        if inputs and (own is None or own.code is MissCode.NOT_QUANTIZED):
            return _missed(max(inputs, key=lambda miss: miss.progress))
        if own is not None:
            return _missed(own)
        for name in product.upstream:
            if self._is_stray(name):
                return self._of_left(self._left[name])
        reason = "it computes in float"
        if product.place.op in RECURRENT_NAMES:
            reason = "a recurrent layer multiplies in float, only its linears can be quantized"
        return Cause(MissCode.NOT_QUANTIZED, product.place.op, reason)

    def _quantize(self, left: Left) -> tuple[Cause, Place, float | None]:
        estimate = self._estimates.get(left.place.node)
        seconds = None if estimate is None else estimate.float_seconds
        miss = self._misses.get(left.place.node)
        if miss is None:
            return self._of_left(left), left.place, seconds
        return Cause(miss.code, miss.rule, miss.reason, left.reason), left.place, seconds


def _closest_kernel(lowered: Lowered) -> Cause:
    """Return why the kernel that came closest did not take an op."""
    # One that was asked twice was asked about the quantized activation first, which is listed last.
    asked = {progress.kernel: (progress, reason) for progress, reason in lowered.lost}
    # Those that came equally close are in the order of the registry, the most general one first.
    nearest = sorted(asked.values(), key=lambda pair: -pair[0].share)
    losers = {progress.kernel: reason for progress, reason in nearest}
    causes = [
        Cause(MissCode.NO_KERNEL, name, reason)
        for name, reason in (losers or {lowered.kernel: lowered.why}).items()
    ]
    # Kernels for integer activations did not come close to a float one, and the other way round.
    near = [cause for cause in causes if cause.reason not in _OTHER_ACTIVATIONS] or causes
    # What can be acted on: what came closest of those that a suggestion helps, if there are any.
    return next((cause for cause in near if advice_for(cause) is not None), near[0])


def _missed(miss: Missed) -> Cause:
    # A module `layers.0` has its weight as the constant `layers_0_weight`.
    weight = f"{miss.anchor.module.replace('.', '_')}_weight"
    own = miss.at.op == "get_attr" and miss.at.node.lstrip("_") == weight
    return Cause(miss.code, miss.rule, miss.reason, OF_A_MODULE if own else "")
