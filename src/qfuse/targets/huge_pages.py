"""Memory for weights in huge pages.

A row of activations reads all weights of a model once, from memory. With pages of 4 KiB a thread
waits for page tables about as long as for the weights; pages of 2 MiB have a five-hundredth of
them. Linux gives them to memory that asks for them, unless the administrator has switched it off.
"""

from __future__ import annotations

import logging
import mmap
import sys
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

_HUGE = 2 << 20  # on x86, and on ARM with base pages of 4 KiB
# Only addresses: memory that is never written to takes no place.
_AREA_BYTES = 64 << 20
_LEAST_BYTES = 64 << 10
_ALIGNMENT = 128
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class HugePages:
    """Puts tensors one after the other into huge pages, where the system has them.

    Memory is returned when no tensor of an area of 64 MiB exists any more.

    Args:
        setting: The file with the administrator's choice.
    """

    def __init__(self, setting: Path = _SETTING) -> None:
        self._allowed = _is_allowed(setting)
        self._area: mmap.mmap | None = None
        self._used = 0

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in huge pages, with a storage of its own.

        Returns the tensor itself if it is small or not a contiguous tensor of the CPU, and where
        the system has no such pages.
        """
        amount = tensor.nbytes
        if not self._allowed or amount < _LEAST_BYTES or not _is_plain(tensor):
            return tensor
        if self._area is None or self._used + amount > len(self._area):
            try:
                self._open(amount)
            except OSError as error:
                _log.debug("no memory for huge pages: %s", error)
                return tensor
        assert self._area is not None, "an area was opened"
        flat = torch.frombuffer(self._area, dtype=torch.uint8, count=amount, offset=self._used)
        self._used += -(-amount // _ALIGNMENT) * _ALIGNMENT
        return flat.view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of any tensor, in huge pages where it can be placed there."""
        placed = self.place(tensor)
        return tensor.clone() if placed is tensor else placed

    def _open(self, amount: int) -> None:
        size = -(-max(amount, _AREA_BYTES) // _HUGE) * _HUGE
        self._area = _reserve(size + _HUGE)
        # Pages begin at multiples of their size, areas at any page.
        self._used = -torch.frombuffer(self._area, dtype=torch.uint8).data_ptr() % _HUGE


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
    )


def _is_allowed(setting: Path) -> bool:
    """Whether programs get huge pages that ask for them."""
    if sys.platform != "linux":
        return False
    try:
        return "[never]" not in setting.read_text(encoding="ascii")
    except OSError:
        return False  # a system without them


def _reserve(size: int) -> mmap.mmap:
    assert sys.platform == "linux", "other systems have no such advice"
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    return area
