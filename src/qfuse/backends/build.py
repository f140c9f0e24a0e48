"""Compile a graph with AOTInductor: as one package, or as a chain of blocks."""

from __future__ import annotations

from pathlib import Path

from qfuse.backends.aoti import AotiRunner, load_runner
from qfuse.backends.blocks.build import compile_blocks
from qfuse.backends.cache import CompiledCode
from qfuse.backends.compiler import compile_program, for_people
from qfuse.backends.eager import run_eagerly
from qfuse.backends.prepare import Program, prepare
from qfuse.backends.runner import BackendOptions, Progress
from qfuse.ir.events import Noted
from qfuse.ir.graph.stage_graph import LoweredGraph


def compile_aoti(
    lowered: LoweredGraph, options: BackendOptions, progress: Progress | None = None
) -> AotiRunner:
    """Compile ``lowered``, or load it from the cache.

    Raises:
        BackendError: There is no working C++ compiler, or the compilation failed.
    """
    tell = progress or _ignore
    tell("preparing the graph for AOTInductor")
    program = prepare(lowered)
    otherwise = run_eagerly(lowered)
    runner = compile_blocks(program, otherwise, options, tell, lowered.log)
    if runner is None:

        def load(package: Path, code: CompiledCode) -> AotiRunner:
            constants = program.constants
            return load_runner(package, code, program, constants, otherwise, options.runners)

        runner = compile_program(program, options, tell, load)
    _note_conditions(runner, program, lowered)
    return runner


def _note_conditions(runner: AotiRunner, program: Program, lowered: LoweredGraph) -> None:
    for text in runner.code.conditions:
        note = f"compiled code is used if {for_people(program, text)}; calls of other sizes run "
        lowered.log.add(Noted("backends", f"{note}op by op", warn=True))


def _ignore(_text: str) -> None:
    """Ignore progress messages."""
