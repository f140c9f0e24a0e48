"""Shortcuts in torch.export: the tests' only file with private API of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.export import exported_program

_COLLECT = "_collect_all_valid_cia_ops"
_KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")
_DEVICES = ("CPU", "CUDA", "Meta")


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Make a small capture take half the time.

    Each export lists all composite ops of torch, and overrides them for a dozen kinds of devices.
    Here the list is made again only when ops were registered, and the overrides are for devices
    that tests have.
    """
    collect = getattr(exported_program, _COLLECT)
    known: dict[int, Any] = {}

    def collected() -> Any:
        count = len(torch._C._dispatch_get_all_op_names())
        if count not in known:
            known.clear()
            known[count] = collect()
        return known[count]

    patch.setattr(exported_program, _COLLECT, collected)
    for name in _KEYS:
        keys = [key for key in getattr(exported_program, name) if key.name.endswith(_DEVICES)]
        patch.setattr(exported_program, name, keys)
