"""Compile the repeated blocks of a program once."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial
from pathlib import Path

from qfuse.backends._inductor_api import FAILURES
from qfuse.backends.aoti import AotiRunner, chain_runner
from qfuse.backends.blocks.chain import CompiledChain, check_package, joint_conditions
from qfuse.backends.blocks.cut import CutProgram, cut_blocks
from qfuse.backends.blocks.find import LEAST, Blocks, find_blocks
from qfuse.backends.blocks.wiring import Wiring
from qfuse.backends.cache import CompiledCode
from qfuse.backends.compiler import compile_program
from qfuse.backends.eager import EagerRunner
from qfuse.backends.key import constant_digest
from qfuse.backends.prepare import Program
from qfuse.backends.runner import BackendOptions, BlockChoice, Progress
from qfuse.ir.errors import BackendError
from qfuse.ir.events import EventLog, Noted
from qfuse.ir.refusal import Refusal
from qfuse.kernels.library import is_loaded

DEEP = 20
"""So many blocks pay for compilations of their own; fewer take as long as one package."""

# Of the bytes that a block computes: what is read besides takes little time.
_MOST_BROADCAST = 0.05

_logger = logging.getLogger("qfuse")


def compile_blocks(
    program: Program,
    otherwise: EagerRunner,
    options: BackendOptions,
    tell: Progress,
    log: EventLog,
) -> AotiRunner | None:
    """Compile ``program`` in parts if it repeats a block, or find the parts in the cache.

    ``None`` if it has to be one package. The log says so, with the reason, if blocks were asked for
    or parts were compiled in vain.

    Args:
        program: The program.
        otherwise: Runs the calls for which the code is wrong.
        options: Options of the compilation.
        tell: Called with a short description when a step begins.
        log: Says what was done.
    """
    if options.blocks is BlockChoice.OFF:
        return None
    wanted = options.blocks is BlockChoice.ON
    parts = _cut(program, wanted=wanted)
    made = _compiled(parts, program, otherwise, options, tell)
    if isinstance(made, AotiRunner):
        log.add(Noted("backends", _summary(made)))
        return made
    text = f"the graph is compiled as one package: {made.reason}"
    # Most graphs have no blocks; of others, parts were compiled in vain.
    tried = made is not parts
    if tried:
        tell("compiling as one package instead")
    if tried or wanted:
        log.add(Noted("backends", text, warn=wanted))
    _logger.log(logging.INFO if tried else logging.DEBUG, text)
    return None


def _cut(program: Program, *, wanted: bool) -> CutProgram | Refusal:
    """Find and cut the blocks; unless they were asked for, an error leaves one package."""
    try:
        return _parts(program, wanted=wanted)
    except FAILURES as error:
        if wanted:
            raise
        _logger.warning("the blocks of a graph were not found, which is a bug", exc_info=True)
        return Refusal(f"finding its blocks failed: {type(error).__name__}: {error}")


def _compiled(
    parts: CutProgram | Refusal,
    program: Program,
    otherwise: EagerRunner,
    options: BackendOptions,
    tell: Progress,
) -> AotiRunner | Refusal:
    """Compile the parts, and load them; a refusal stays the one that it is."""
    if isinstance(parts, Refusal):
        return parts
    times = Counter(step.part for step in parts.wiring.steps)
    codes: dict[int, CompiledCode] = {}
    try:
        # The block first: it may be one that is not shared.
        for number, (part, count) in enumerate(times.most_common(), 1):
            place = f"part {number} of {len(times)}"
            codes[part] = _code(parts.parts[part], options, partial(_tell_part, tell, place))
            if count > 1 and (reason := _unshared(part, codes[part], parts.wiring, program)):
                return Refusal(reason)
        ordered = tuple(codes[part] for part in range(len(parts.parts)))
        conditions = joint_conditions(ordered, parts.sizes)
        chain = CompiledChain(ordered, parts.wiring, conditions)
        return chain_runner(chain, program, program.constants, otherwise, options.runners)
    # One package may still work; if not, its error is the one to report.
    except BackendError as error:
        return Refusal(str(error))


def _tell_part(tell: Progress, place: str, text: str) -> None:
    tell(f"{text} ({place})")


def _parts(program: Program, *, wanted: bool) -> CutProgram | Refusal:
    if not is_loaded():
        return Refusal("qfuse's kernels are not loaded, which run several packages in one call")
    blocks = find_blocks(program, LEAST if wanted else DEEP)
    if isinstance(blocks, Refusal):
        return blocks
    if not wanted and (reason := _too_dear(blocks)):
        return Refusal(reason)
    return cut_blocks(program, blocks)


def _too_dear(blocks: Blocks) -> str | None:
    """Return why a call would take longer, or the compilation as long as before."""
    if blocks.fused:
        return f"each boundary between blocks would store {blocks.fused} bytes that stay in a loop"
    if blocks.broadcast > _MOST_BROADCAST * blocks.made:
        return f"{blocks.broadcast} bytes that the blocks read are broadcast, and would be stored"
    inside = len(blocks.occurrences) * len(blocks.occurrences[0].nodes)
    if inside < len(blocks.before) + len(blocks.after):
        return f"only {inside} of its calls are in equal blocks"
    return None


def _code(part: Program, options: BackendOptions, tell: Progress) -> CompiledCode:
    def keep(_package: Path, code: CompiledCode) -> CompiledCode:
        check_package(code)
        return code

    return compile_program(part, options, tell, keep)


def _unshared(part: int, code: CompiledCode, wiring: Wiring, program: Program) -> str | None:
    """Return why the code of the first block is not that of the others."""
    for name in code.extras:
        return f"the compiler made a constant of its own, {name}, for one block"
    for step in wiring.steps:
        if step.part != part:
            continue
        for name, digest in code.baked.items():
            if constant_digest(program.constants[step.constants[name]]) != digest:
                return "a constant became a part of the code, and differs between the blocks"
    return None


def _summary(runner: AotiRunner) -> str:
    assert isinstance(runner.code, CompiledChain), "blocks are a chain"
    steps = [step.part for step in runner.code.wiring.steps]
    times = max(map(steps.count, steps))
    return (
        f"the graph repeats a block {times} times, which is compiled once: "
        f"{len(runner.code.codes)} packages, run {len(steps)} times in a call"
    )
