"""Measure what is close: the best kernels of every distinct product, and its float form."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from qfuse.cost import seconds_text
from qfuse.cost.times import Times
from qfuse.ir.events import FLOAT, Noted
from qfuse.lower.floats.form import float_product_work
from qfuse.lower.floats.policy import FloatPolicy
from qfuse.lower.measure.sample import float_run, kernel_run
from qfuse.lower.measure.timer import Run, Timer, interleaved_medians
from qfuse.lower.problems.product import ProductProblem
from qfuse.lower.select.context import LoweringContext
from qfuse.lower.select.texts import product_text

SECONDS = 20.0
"""The default budget: enough for every product of the models of the zoo."""
# Kernels that are predicted to take longer than this many times the best one are not measured.
_CLOSE = 2.0


@dataclass(slots=True)
class Measurer:
    """Measures products within a budget.

    Attributes:
        seconds: The budget of one compilation.
        timer: Times functions.
        clock: Returns the seconds that the budget counts.
        say: Called with what is done.
        spent: Seconds spent so far.
        stopped: Why the rest is predicted, or "".
    """

    seconds: float = SECONDS
    timer: Timer = interleaved_medians
    clock: Callable[[], float] = time.perf_counter
    say: Callable[[str], None] | None = None
    spent: float = 0.0
    stopped: str = ""

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
        runs = dict(_alternatives(problem, context, policy))
        if len(runs) < 2:  # noqa: PLR2004 - nothing to choose from
            return False
        with torch.no_grad():
            seconds = self.timer(list(runs.values()))
        context.times.add(text, dict(zip(runs, seconds, strict=True)))
        return True

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


def _alternatives(
    problem: ProductProblem, context: LoweringContext, policy: FloatPolicy
) -> Iterator[tuple[str, Run]]:
    """Yield the kernels that are predicted to be close to the best one, and the float form."""
    offers = context.offers(problem)
    if not offers:
        return
    limit = _CLOSE * min(offer.seconds for offer in offers)
    for offer in offers:
        if offer.seconds <= limit:
            yield offer.kernel.name, kernel_run(problem, offer, context)
    if policy.fastest and float_product_work(problem) is not None:
        yield FLOAT, float_run(problem)
