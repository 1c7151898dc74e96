"""Pictures of any size as patches: how one is cut, and how one is put together again."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

_STEP = 128
"""Rows of patches are a multiple of it: what attention kernels' blocks ask for."""


class Patching(NamedTuple):
    """How a model cuts pictures of any size; the settings of its ``VisionConfig``."""

    size: int
    """Pixels a side of a patch."""
    block: int = 1
    """Patches come in blocks of m x m neighbours, blocks row by row, each row by row."""
    frames: int = 1
    """Of a video in one patch; a picture is repeated as often."""
    layout: str = "cthw"
    """Of the values in a patch: ``hwc`` | ``cthw``."""

    @property
    def patch_dim(self) -> int:
        """Values in a patch."""
        return 3 * self.frames * self.size**2

    @property
    def side(self) -> int:
        """Pixels that both sides of a picture are a multiple of."""
        return self.size * self.block

    @property
    def per_token(self) -> int:
        """Patches that become one visual token."""
        return self.block**2

    def grid(self, pixels: UInt8[np.ndarray, "H W 3"]) -> tuple[int, int, int]:
        """(frames, rows, columns) in patches."""
        return 1, pixels.shape[0] // self.size, pixels.shape[1] // self.size

    def cut(self, pixels: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "P patch_dim"]:
        """A picture's patches; both its sides are multiples of :attr:`side`."""
        _, rows, columns = self.grid(pixels)
        m, p = self.block, self.size
        x = pixels.reshape(rows // m, m, p, columns // m, m, p, 3)
        if self.layout == "hwc":
            x = x.transpose(0, 3, 1, 4, 2, 5, 6)
        else:
            x = x.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
            x = np.broadcast_to(x, (*x.shape[:5], self.frames, p, p))
        return x.reshape(rows * columns, self.patch_dim)

    def join(self, patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """[H, W, 3]: what :meth:`cut` made ``patches`` [rows * columns, patch_dim] of."""
        m, p = self.block, self.size
        blocks = (rows // m, columns // m, m, m)
        if self.layout == "hwc":
            x = patches.reshape(*blocks, p, p, 3).transpose(0, 2, 4, 1, 3, 5, 6)
        else:
            x = patches.reshape(*blocks, 3, self.frames, p, p)[:, :, :, :, :, 0]
            x = x.transpose(0, 2, 5, 1, 3, 6, 4)
        return x.reshape(rows * p, columns * p, 3)

    def room(self, patches: int) -> int:
        """Places for at least so many patches, in whole blocks and a size that kernels like."""
        step = math.lcm(_STEP, self.per_token)
        return max(1, -(-patches // step)) * step
