"""Sizes that several convolutional networks share."""

from __future__ import annotations

from dataclasses import dataclass

from qfuse.ir.errors import OptionsError
from qfuse.zoo.images import ImageSizes


@dataclass(frozen=True, kw_only=True)
class ScaledSizes(ImageSizes):
    """Sizes of a network whose channels are scaled.

    Attributes:
        multiplier: Factor on the number of channels.
    """

    multiplier: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a network without channels."""
        super().__post_init__()
        if self.multiplier <= 0:
            raise OptionsError(f"multiplier={self.multiplier} leaves no channels", fix="give 1.0")

    def scaled(self, channels: int) -> int:
        """Return a scaled number of channels, a multiple of 8."""
        return multiple_of_8(channels * self.multiplier)


@dataclass(frozen=True, kw_only=True)
class InvertedResidualSizes(ScaledSizes):
    """Sizes of a network of inverted residual blocks.

    Attributes:
        depth: The greatest number of blocks in a stage; by default all of them.
    """

    depth: int = 4


def multiple_of_8(channels: float) -> int:
    """Round to a multiple of 8, by at most a tenth downwards, as the MobileNets do."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


def require_stages(depths: tuple[int, ...], most: int) -> None:
    """Raise unless a network has from one to `most` stages."""
    if not 1 <= len(depths) <= most:
        raise OptionsError(
            f"depths={depths} has {len(depths)} stages",
            fix=f"give 1 to {most} numbers, as in depths={','.join('2' * most)}",
        )
