"""Cut images of any size into patches, and join patches to images."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

_STEP = 128
"""Padded numbers of patches are a multiple of it, as attention kernels' blocks require."""


class Patching(NamedTuple):
    """Patch layout of images of any size, from the model's ``VisionConfig``."""

    size: int
    """Height and width of a patch in pixels."""
    block: int = 1
    """Patches are grouped in blocks of m x m neighbours; blocks, and patches within a block, are
    in row-major order."""
    frames: int = 1
    """Frames of a video in one patch; an image is repeated that many times."""
    layout: str = "cthw"
    """Order of the values in a patch: ``hwc`` | ``cthw``."""

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return 3 * self.frames * self.size**2

    @property
    def side(self) -> int:
        """Height and width of a block in pixels; both sides of an image are a multiple of it."""
        return self.size * self.block

    @property
    def per_token(self) -> int:
        """Patches that become one visual token."""
        return self.block**2

    def grid(self, pixels: UInt8[np.ndarray, "H W 3"]) -> tuple[int, int, int]:
        """Grid (frames, rows, columns) of an image in patches."""
        return 1, pixels.shape[0] // self.size, pixels.shape[1] // self.size

    def cut(self, pixels: UInt8[np.ndarray, "H W 3"]) -> UInt8[np.ndarray, "P patch_dim"]:
        """Cut an image into patches; both its sides are multiples of :attr:`side`."""
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
        """Join patches [rows * columns, patch_dim] to an image [H, W, 3]; inverts :meth:`cut`."""
        m, p = self.block, self.size
        blocks = (rows // m, columns // m, m, m)
        if self.layout == "hwc":
            x = patches.reshape(*blocks, p, p, 3).transpose(0, 2, 4, 1, 3, 5, 6)
        else:
            x = patches.reshape(*blocks, 3, self.frames, p, p)[:, :, :, :, :, 0]
            x = x.transpose(0, 2, 5, 1, 3, 6, 4)
        return x.reshape(rows * p, columns * p, 3)

    def padded_count(self, patches: int) -> int:
        """Round a number of patches up to complete blocks and a multiple that kernels support."""
        step = math.lcm(_STEP, self.per_token)
        return max(1, -(-patches // step)) * step
