"""Compile the repeated blocks of a program once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from qfuse.backends.aoti import AotiRunner, chain_runner
from qfuse.backends.blocks.chain import CompiledChain, joint_conditions
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

DEEP = 18
"""Blocks that occur so often pay for compilations of their own; 15 take as long either way."""

_logger = logging.getLogger("qfuse")


def compile_blocks(
    program: Program,
    otherwise: EagerRunner,
    options: BackendOptions,
    tell: Progress,
    log: EventLog,
) -> AotiRunner | None:
    """Compile ``program`` in parts if it repeats a block, or find the parts in the cache.

    ``None`` if it has to be one package. The log says so, with the reason, if blocks were asked
    for.

    Args:
        program: The program.
        otherwise: Runs the calls for which the code is wrong.
        options: Options of the compilation.
        tell: Called with a short description when a step begins.
        log: Says what was done.
    """
    if options.blocks is BlockChoice.OFF:
        return None
    made = _compiled(program, otherwise, options, tell)
    if isinstance(made, AotiRunner):
        log.add(Noted("backends", _summary(made)))
        return made
    text = f"the graph is compiled as one package: {made.reason}"
    if options.blocks is BlockChoice.ON:
        log.add(Noted("backends", text, warn=True))
    _logger.info(text)
    return None


def _compiled(
    program: Program, otherwise: EagerRunner, options: BackendOptions, tell: Progress
) -> AotiRunner | Refusal:
    parts = _parts(program, options)
    if isinstance(parts, Refusal):
        return parts
    try:
        codes = [_code(part, options, tell) for part in parts.parts]
        wrong = _wrong_constant(codes, parts.wiring, program.constants)
        if wrong is not None:
            return Refusal(f"{wrong} became a part of the code, and differs between the blocks")
        conditions = joint_conditions(codes, parts.sizes)
        chain = CompiledChain(tuple(codes), parts.wiring, conditions)
        return chain_runner(chain, program, program.constants, otherwise, options.runners)
    # One package may still work; if not, its error is the one to report.
    except BackendError as error:
        return Refusal(str(error))


def _parts(program: Program, options: BackendOptions) -> CutProgram | Refusal:
    if not is_loaded():
        return Refusal("qfuse's kernels are not loaded, which run several packages in one call")
    wanted = options.blocks is BlockChoice.ON
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
    inside = len(blocks.occurrences) * len(blocks.occurrences[0].nodes)
    if inside < len(blocks.before) + len(blocks.after):
        return f"only {inside} of its calls are in equal blocks"
    return None


def _code(part: Program, options: BackendOptions, tell: Progress) -> CompiledCode:
    def keep(_package: Path, code: CompiledCode) -> CompiledCode:
        return code

    return compile_program(part, options, tell, keep)


def _wrong_constant(
    codes: list[CompiledCode], wiring: Wiring, constants: Mapping[str, torch.Tensor]
) -> str | None:
    """Return a constant whose value is in the code of a part, and is not the one of a step."""
    for step in wiring.steps:
        for name, digest in codes[step.part].baked.items():
            if constant_digest(constants[step.constants[name]]) != digest:
                return step.constants[name]
    return None


def _summary(runner: AotiRunner) -> str:
    assert isinstance(runner.code, CompiledChain), "blocks are a chain"
    steps = [step.part for step in runner.code.wiring.steps]
    times = max(map(steps.count, steps))
    return (
        f"the graph repeats a block {times} times, which is compiled once: "
        f"{len(runner.code.codes)} packages, run {len(steps)} times in a call"
    )
