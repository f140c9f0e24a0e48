"""Ops of other packages, looked up by name on access.

A graph can only call an op that some package has registered, so a dialect never imports the
package: ops that are not registered do not become anchors.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload


def registered(*names: str) -> tuple[OpOverload, ...]:
    """Return every registered overload of the ops ``namespace::name``."""
    found: list[OpOverload] = []
    for name in names:
        namespace, _, op = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            found += [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(found)


class Registered:
    """Class attribute that returns :func:`registered` of the given names, on every access."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __get__(self, instance: object, owner: type) -> tuple[OpOverload, ...]:
        """Look the ops up."""
        return registered(*self._names)
