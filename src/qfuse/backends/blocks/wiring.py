"""How compiled parts of a program are run one after another, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

NOWHERE = -1
"""Instead of a number: the value is dropped."""


@dataclass(frozen=True, slots=True)
class PartRun:
    """One run of a part.

    Attributes:
        part: Which one.
        inputs: Numbers of the values that it reads.
        outputs: Numbers of the values that it makes; :data:`NOWHERE` for those that nothing reads.
        constants: The constant of the whole program for each constant of the part.
    """

    part: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    constants: dict[str, str]


@dataclass(frozen=True, slots=True)
class Wiring:
    """The steps of a call, and the table of values between them.

    Attributes:
        inputs: How many inputs a call has; they are the first values.
        size: How many values there are.
        steps: What is run.
        orders: The axes, slowest first, that the users of a value were compiled for.
        held: Values that are constants, by number.
        results: Numbers of the values that a call returns.
    """

    inputs: int
    size: int
    steps: tuple[PartRun, ...]
    orders: dict[int, tuple[int, ...]]
    held: dict[int, str]
    results: tuple[int, ...]
