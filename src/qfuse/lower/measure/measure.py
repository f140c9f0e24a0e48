"""Measure what is close: the best kernels of every distinct product, and its float form."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from qfuse.cost import seconds_text
from qfuse.cost.times import Times
from qfuse.ir.events import FLOAT, Noted
from qfuse.lower.floats.form import float_product_work
from qfuse.lower.floats.policy import FloatPolicy
from qfuse.lower.measure.sample import Sample, float_sample, kernel_sample
from qfuse.lower.measure.timer import Timer, interleaved_medians
from qfuse.lower.problems.product import ProductProblem
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.texts import product_text

SECONDS = 20.0
"""The default budget: enough for every product of the models of the zoo."""
CLOSE = 2.0
"""Kernels that are predicted to take longer than this many times the best one are not measured."""


@dataclass(slots=True)
class Measurer:
    """Measures products within a budget.

    Attributes:
        seconds: The budget of one compilation.
        timer: Times functions.
        clock: Returns the seconds that the budget counts.
        say: Called with what is done.
        close: Kernels that are predicted to take this many times the best one are not measured;
            ``None`` measures all.
        spent: Seconds spent so far.
        stopped: Why the rest is predicted, or "".
        predicted: The predicted seconds of what was measured last.
    """

    seconds: float = SECONDS
    timer: Timer = interleaved_medians
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] | None = None
    close: float | None = CLOSE
    spent: float = 0.0
    stopped: str = ""
    predicted: dict[str, float] = field(default_factory=dict)

    def measure(
        self,
        products: Sequence[ProductProblem],
        context: LoweringContext,
        policy: FloatPolicy,
    ) -> None:
        """Add the times of ``products`` to those of ``context``, and log what was measured."""
        todo = _distinct(products, context.times)
        if not todo:
            return
        if self.say is not None:
            self.say(f"measuring {len(todo)} products")
        done = 0
        for text, problem in todo.items():
            if self.stopped:
                break
            begin = self.clock()
            try:
                done += self._one(text, problem, context, policy)
            except KeyboardInterrupt:
                self.stopped = "measuring was interrupted"
            self.spent += self.clock() - begin
            if self.spent > self.seconds and not self.stopped:
                self.stopped = f"the {self.seconds:g} s of measure_seconds are used up"
        self._log(done, len(todo), context)

    def _one(
        self, text: str, problem: ProductProblem, context: LoweringContext, policy: FloatPolicy
    ) -> bool:
        """Measure one product if there is a choice; return whether there is."""
        found = list(self._alternatives(problem, context, policy))
        if len(found) < 2:  # noqa: PLR2004 - nothing to choose from
            return False
        samples = {name: sample for name, _, sample in found}
        self.predicted = {name: seconds for name, seconds, _ in found}
        with torch.no_grad():
            seconds = self.timer([sample.run for sample in samples.values()])
        # Without a compiler, Python calls the kernels of the graph too.
        python = context.cost.profile.python_call_seconds if context.cost.loops else 0.0
        timed = zip(samples.items(), seconds, strict=True)
        context.times.add(text, {n: one.compiled_seconds(s, python) for (n, one), s in timed})
        return True

    def _alternatives(
        self, problem: ProductProblem, context: LoweringContext, policy: FloatPolicy
    ) -> Iterator[tuple[str, float, Sample]]:
        """Yield the close kernels and the float form: name, predicted seconds, what runs it."""
        offers, cost = context.offers(problem), context.cost
        if not offers:
            return
        limit = math.inf if self.close is None else self.close * min(o.seconds for o in offers)
        for offer in offers:
            if offer.seconds <= limit:
                alone = offer.predicted - cost.loop_seconds(offer.claim.work)
                yield offer.kernel.name, alone, kernel_sample(problem, offer, context)
        work = float_product_work(problem)
        if policy.fastest and work is not None:
            yield FLOAT, cost.seconds(work), float_sample(problem)

    def _log(self, done: int, count: int, context: LoweringContext) -> None:
        if done:
            text = f"the alternatives for {done} products were measured"
            context.program.log.add(Noted(context.stage, f"{text} in {seconds_text(self.spent)}"))
        if self.stopped and done < count:
            text = f"{self.stopped}: the times of {count - done} products are predicted"
            context.program.log.add(Noted(context.stage, text, warn=True))


def _distinct(products: Sequence[ProductProblem], times: Times) -> dict[str, ProductProblem]:
    """Return the products that are not known, one of each text."""
    found: dict[str, ProductProblem] = {}
    for problem in products:
        text = product_text(problem)
        if not times.of(text):
            found.setdefault(text, problem)
    return found
