"""Read video files by PyAV: when their frames are shown, and the pixels of some of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.images import image_files
from jaxvlm.data.images.patches import MAX_SIDE
from jaxvlm.data.sources.member_names import bare, is_file, shown

FORMATS = (
    *("mov", "mp4", "m4a", "3gp", "3g2", "mj2", "matroska", "webm", "avi", "gif", "mpegts"),
    *("mpeg", "flv", "ogg", "asf"),
)
"""Containers that are read. FFmpeg knows more, and some of those (playlists) open other files."""
_OPTIONS = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"}
_EBML, _SEGMENT = b"\x1a\x45\xdf\xa3", b"\x18\x53\x80\x67"
_UNEVEN = 0.5
"""Frames that are this many intervals away from an even rate make a video of variable rate."""


class Clip(NamedTuple):
    """The frames of a video file."""

    pts: np.ndarray
    """i64[n]: presentation timestamps, ascending, in units of the file's; or 0, 1, 2, ... where the
    file has none."""
    is_key: np.ndarray
    """bool[n]: whether decoding can begin at the frame."""
    times: np.ndarray
    """f64[n]: seconds at which each frame is shown; the first is at 0."""
    rate: float
    """Frames a second, on average."""
    width: int
    """Of an upright frame, in pixels."""
    height: int
    is_timed: bool = True
    """Whether the file has timestamps."""

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.pts) / self.rate

    def at(self, index: np.ndarray) -> np.ndarray:
        """Frames by their place at an even rate.

        Args:
            index: i64[k]: the frame that is shown at ``index / rate`` seconds.

        Returns:
            i64[k]: indices of the frames; ``index`` itself where the rate is constant.
        """
        index = np.clip(index, 0, len(self.pts) - 1)
        asked = index / self.rate + 1e-6 / self.rate
        return np.maximum(np.searchsorted(self.times, asked, side="right") - 1, 0)


def check(path: str, max_pixels: int) -> str | None:
    """The reason why a video can't be read, or None if its frames can be found."""
    try:
        read_clip(path, max_pixels)
    except ImageError as error:
        return str(error)
    return None


def read_clip(path: str, max_pixels: int) -> Clip:
    """Read which frames a video has, without decoding more than its first.

    Args:
        path: video file, or one inside of another file.
        max_pixels: maximum of a frame's width times height.

    Raises:
        ImageError: it can't be read; the message is the reason.
        DataError: PyAV is not installed.
    """
    with _opened(path) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise ImageError("a video without a frame")
        width, height = first.width, first.height
        if width * height > max_pixels:
            raise ImageError(f"more than data.max_pixels={max_pixels} pixels")
        if max(width, height) > MAX_SIDE:
            raise ImageError(f"a side of more than {MAX_SIDE} pixels")
        if first.rotation % 180:
            width, height = height, width
        rate, base = float(stream.average_rate or 0), float(stream.time_base or 0)
    with _opened(path) as (container, stream):
        packets = [p for p in container.demux(stream) if p.size and not p.is_discard]
        pts = [p.pts for p in packets]
        key = [bool(p.is_keyframe) for p in packets]
        if stream.frames > len(pts):
            raise ImageError("truncated file")
        if None in pts:
            return _counted(path, rate, width, height)
    order = np.argsort(np.asarray(pts, np.int64), kind="stable")
    stamps = np.asarray(pts, np.int64)[order]
    if len(np.unique(stamps)) < len(stamps):
        raise ImageError("a video with two frames at one time")
    times = (stamps - stamps[0]) * base
    if len(stamps) > 1 and times[-1] > 0:
        mean = (len(stamps) - 1) / times[-1]
        # Take the file's word for the rate, as others do; but not where its frames say otherwise.
        even = np.arange(len(stamps))
        if not rate or np.abs(times * rate - even).max() > _UNEVEN:
            rate = mean
        if np.abs(times * rate - even).max() <= _UNEVEN:
            times = even / rate
    return Clip(stamps, np.asarray(key)[order], times, rate or 1.0, width, height)


def _is_short(file: Any) -> bool:
    """Whether a Matroska or WebM file says that it is longer than it is; FFmpeg reads on."""
    file.seek(0)
    head, size = file.read(512), file.seek(0, io.SEEK_END)
    at = head.find(_SEGMENT)
    if not head.startswith(_EBML) or at < 0:
        return False
    first = head[at + 4]
    count = 9 - first.bit_length()  # bytes of the length: the first one's leading zeros say it
    said = int.from_bytes(head[at + 4 : at + 4 + count], "big") & ~(1 << 7 * count)
    unknown = (1 << 7 * count) - 1  # of a stream that was written without seeking
    return said != unknown and at + 4 + count + said > size


def _counted(path: str, rate: float, width: int, height: int) -> Clip:
    """A clip whose file has no timestamps: its frames are counted by decoding all of them."""
    with _opened(path) as (container, stream):
        count = sum(1 for _ in container.decode(stream))
    index, rate = np.arange(count), rate or 1.0
    return Clip(index, index == 0, index / rate, rate, width, height, is_timed=False)


def read_frames(path: str, clip: Clip, frames: Sequence[int]) -> list[np.ndarray]:
    """Decode frames of a video, upright.

    Args:
        path: the video.
        clip: result of :func:`read_clip`.
        frames: indices into ``clip``.

    Returns:
        u8[H, W, 3] of each.

    Raises:
        ImageError: one can't be decoded; the message is the reason.
    """
    wanted = sorted({int(clip.pts[i]) for i in frames})
    found: dict[int, np.ndarray] = {}
    if clip.is_timed:
        with _opened(path) as opened:
            found = _by_seeking(*opened, clip, wanted)
    if len(found) < len(wanted):  # no timestamps, or an index that leads elsewhere
        with _opened(path) as opened:
            found = _in_order(*opened, clip, wanted)
    missing = [i for i in frames if int(clip.pts[i]) not in found]
    if missing:
        raise ImageError(f"frame {missing[0] + 1} of {len(clip.pts)} can't be decoded")
    return [found[int(clip.pts[i])] for i in frames]


def _by_seeking(
    container: Any, stream: Any, clip: Clip, wanted: Sequence[int]
) -> dict[int, np.ndarray]:
    """Decode from the last key frame before each wanted one, unless that was passed already."""
    found: dict[int, np.ndarray] = {}
    keys, chosen = clip.pts[clip.is_key], set(wanted)
    place = clip.pts[0] - 1
    frames: Iterator[Any] = iter(())
    for target in wanted:
        if target in found:
            continue
        before = int(np.searchsorted(keys, target, side="right"))
        key = int(keys[before - 1] if before else clip.pts[0])
        if key > place:
            container.seek(key, stream=stream)
            frames = container.decode(stream)
        for frame in frames:
            if frame.pts is None:
                continue
            place = frame.pts
            if place in chosen:
                found[place] = _upright(frame)
            if place >= target:
                break
    return found


def _in_order(
    container: Any, stream: Any, clip: Clip, wanted: Sequence[int]
) -> dict[int, np.ndarray]:
    """Decode all frames up to the last wanted one."""
    found: dict[int, np.ndarray] = {}
    chosen = set(wanted)
    for i, frame in enumerate(container.decode(stream)):
        stamp = frame.pts if clip.is_timed else i
        if stamp in chosen:
            found[stamp] = _upright(frame)
            if len(found) == len(chosen):
                break
    return found


def _upright(frame: Any) -> np.ndarray:
    if frame.is_corrupt:
        raise ImageError("a damaged frame")
    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, Any]]:
    """Open a file and its video stream; what FFmpeg raises meanwhile becomes an ImageError."""
    try:
        import av
    except ImportError:
        raise DataError(
            f"{shown(path)}: videos are read by PyAV; install it: pip install 'jaxvlm[video]'"
        ) from None
    av.logging.set_level(av.logging.PANIC)  # faults are raised; it would print them as well
    with contextlib.ExitStack() as stack:
        file: Any = io.BytesIO(image_files.read_bytes(path)) if not is_file(path) else None
        if file is None:
            image_files.check_regular(bare(path))
            file = stack.enter_context(image_files.opened(bare(path)))
        if not file.seek(0, io.SEEK_END):
            raise ImageError("0-byte file")
        if _is_short(file):
            raise ImageError("truncated file")
        file.seek(0)
        try:
            container = stack.enter_context(av.open(file, options=_OPTIONS))
            streams = [
                s for s in container.streams.video if not s.disposition & s.disposition.attached_pic
            ]
            if not streams:
                raise ImageError("a file without a video")
            # What a decoder can't repair is to be an error: FFmpeg would show grey blocks.
            streams[0].codec_context.options = {"err_detect": "explode"}
            yield container, streams[0]
        except av.FFmpegError as error:
            reason = error.strerror or str(error)
            raise ImageError(f"can't be decoded: {reason}") from None
        except (ValueError, MemoryError, UnicodeError) as error:
            raise ImageError(f"can't be decoded: {error or type(error).__name__}") from None
