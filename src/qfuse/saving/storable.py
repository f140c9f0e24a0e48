"""A callable that can be saved, pickled and copied."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from qfuse.backends import CompiledModule
from qfuse.ir.errors import ModelFileError
from qfuse.ir.files import path_of
from qfuse.ir.signature.caller import Caller
from qfuse.pipeline import Plan
from qfuse.report import Report
from qfuse.saving.load import model_from_bytes
from qfuse.saving.model import SavedModel, call_of
from qfuse.saving.save import model_to_bytes, save_model

_KEPT_BYTES = 16 << 20


class StorableModule(CompiledModule):
    """A compiled graph with what is saved beside it.

    Attributes:
        plan: The lowered graph.
        report: The report of its compilation.
    """

    def __init__(
        self,
        module: CompiledModule,
        plan: Plan,
        report: Report,
        examples: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        super().__init__(module.signature, module.runner, module.threads)
        self.plan = plan
        self.report = report
        self._examples = examples

    @classmethod
    def restored(cls, saved: SavedModel, threads: int | None = None) -> Self:
        """Return the callable of a model that was saved, whose calls use so many threads."""
        plan = Plan(saved.lowered, text=saved.plan)
        module = CompiledModule(saved.module.signature, saved.module.runner, threads)
        return cls(module, plan, saved.report, saved.examples)

    @property
    def examples(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Arguments to call the model with: copies of the example inputs, if they were kept."""
        tensors = self.example_tensors
        return None if tensors is None else call_of(self.signature, tensors)

    @property
    def example_tensors(self) -> tuple[torch.Tensor, ...] | None:
        """Copies of the tensors among the example inputs, in the order of the signature."""
        if self._examples is None:
            return None
        return tuple(value.clone() for value in self._examples)

    def save(
        self,
        path: str | os.PathLike[str],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the model to one file, which :func:`qfuse.load` reads.

        The file has the values that the model's buffers have now.

        Args:
            path: The file; an existing one is replaced in one piece.
            args: Example inputs to store, instead of those that the model was compiled with, which
                are stored if they have less than 16 MB.
            kwargs: Example keyword inputs.

        Raises:
            ModelFileError: The model cannot be saved, or the file cannot be written.
            InputError: The example inputs do not match the signature.
        """
        examples = self._examples
        if args or kwargs:
            caller = Caller(self.signature)
            examples = tuple(caller.check(caller.bind(args, kwargs or {})))
        save_model(path_of(path, ModelFileError), self._saved(examples))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the bytes of the file that :meth:`save` writes, and the number of threads."""
        return self._unpickled, (model_to_bytes(self._saved(self._examples)), self.threads)

    @classmethod
    def _unpickled(cls, data: bytes, threads: int | None = None) -> Self:
        return cls.restored(model_from_bytes(data), threads)

    def _saved(self, examples: tuple[torch.Tensor, ...] | None) -> SavedModel:
        return SavedModel(self, self.plan.lowered, self.report, str(self.plan), examples)


def kept_examples(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    """Return copies of example inputs to save with the model, ``None`` if they are large."""
    if sum(value.nbytes for value in inputs) > _KEPT_BYTES:
        return None
    return tuple(value.detach().clone() for value in inputs)
