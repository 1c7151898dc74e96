"""Cut images of any size into patches, and join patches to images."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

Pixels = UInt8[np.ndarray, "*tiles H W 3"]
"""An image, or its tiles."""
MAX_SIDE = 65_535
"""Pixels of an image's longer side, the most that JPEG has. Resizing an image of 1 x 50,000,000
pixels takes gigabytes, because the short side grows before the long one shrinks."""
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

    def grid(self, pixels: UInt8[np.ndarray, "*frames H W 3"]) -> tuple[int, int, int]:
        """Grid (time, rows, columns) of an image, or of :attr:`frames` of a video, in patches."""
        height, width = pixels.shape[-3:-1]
        return 1, height // self.size, width // self.size

    def cut(self, pixels: UInt8[np.ndarray, "*frames H W 3"]) -> UInt8[np.ndarray, "P patch_dim"]:
        """Cut an image, or :attr:`frames` of a video, into patches.

        Both sides of an image are multiples of :attr:`side`.
        """
        _, rows, columns = self.grid(pixels)
        m, p = self.block, self.size
        frames = pixels if pixels.ndim > 3 else pixels[None]
        x = frames.reshape(len(frames), rows // m, m, p, columns // m, m, p, 3)
        if self.layout == "hwc":
            x = x[0].transpose(0, 3, 1, 4, 2, 5, 6)
        else:
            x = x.transpose(1, 4, 2, 5, 7, 0, 3, 6)
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
