"""Read video files by PyAV: when their frames are shown, and the pixels of some of them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
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


def read_clip(path: str, max_pixels: int) -> Clip:
    """Read which frames a video has, without decoding more than its first.

    Args:
        path: video file, or one inside of another file.
        max_pixels: maximum of a frame's width times height.

    Raises:
        ImageError: it can't be read; the message is the reason.
        DataError: PyAV is not installed.
    """
    with _opened(path, max_pixels) as (container, stream):
        _check_size(stream.codec_context.width, stream.codec_context.height, max_pixels)
        first = next(container.decode(stream), None)
        if first is None:
            raise ImageError("a video without a frame")
        width, height = first.width, first.height
        _check_size(width, height, max_pixels)
        if first.rotation % 180:
            width, height = height, width
        rate, base = float(stream.average_rate or 0), float(stream.time_base or 0)
        is_avi = container.format.name == "avi"
        has_later = bool(stream.codec_context.has_b_frames)
    with _opened(path, max_pixels) as (container, stream):
        found, count = [], 0
        for packet in container.demux(stream):
            count += packet.dts is not None or packet.size > 0
            if packet.size and not packet.is_discard:
                found.append((packet.pts, packet.is_keyframe))
        if is_avi and stream.frames > count:
            raise ImageError("truncated file")
    pts, key = [x[0] for x in found], [bool(x[1]) for x in found]
    # An AVI's timestamps are those of decoding: frames that are decoded before they are shown
    # have others.
    if None in pts or (is_avi and has_later):
        return _counted(path, rate, width, height, max_pixels)
    if True in key:  # what comes before can't be decoded: a recording may begin anywhere
        begin = key.index(True)
        kept = [i for i in range(begin, len(pts)) if pts[i] >= pts[begin]]
        pts, key = [pts[i] for i in kept], [key[i] for i in kept]
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
    """Whether a Matroska or MP4 file says that it is longer than it is; FFmpeg reads on."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(512)
    if head[4:8] == b"ftyp":
        return _has_short_box(file, size)
    at = head.find(_SEGMENT)
    if not head.startswith(_EBML) or at < 0:
        return False
    if len(head) <= at + 4:
        return True
    first = head[at + 4]
    count = 9 - first.bit_length()  # bytes of the length: the first one's leading zeros say it
    said = int.from_bytes(head[at + 4 : at + 4 + count], "big") & ~(1 << 7 * count)
    unknown = (1 << 7 * count) - 1  # of a stream that was written without seeking
    return said != unknown and at + 4 + count + said > size


def _has_short_box(file: Any, size: int) -> bool:
    """Whether a box of an MP4 or MOV file ends after the file; after its index and its frames,
    anything may follow."""
    at, seen = 0, set[bytes]()
    while at + 8 <= size:
        file.seek(at)
        head = file.read(16)
        length = int.from_bytes(head[:4], "big")
        if length == 1:
            length = int.from_bytes(head[8:16], "big")
        if length == 0:  # to the file's end
            return False
        kind = head[4:8]
        if length < 8 or at + length > size:
            return kind in (b"moov", b"moof", b"mdat") or not seen >= {b"moov", b"mdat"}
        seen.add(kind)
        at += length
    return False


def _check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse frames that are too large; raises ImageError."""
    if width * height > max_pixels:
        raise ImageError(f"more than data.max_pixels={max_pixels} pixels")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"a side of more than {MAX_SIDE} pixels")


def _counted(path: str, rate: float, width: int, height: int, max_pixels: int) -> Clip:
    """A clip whose file has no timestamps: its frames are counted by decoding all of them."""
    with _opened(path, max_pixels) as (container, stream):
        count = sum(1 for _ in container.decode(stream))
    index, rate = np.arange(count), rate or 1.0
    return Clip(index, index == 0, index / rate, rate, width, height, is_timed=False)


def read_frames(
    path: str,
    clip: Clip,
    frames: Sequence[int],
    change: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> list[np.ndarray]:
    """Decode frames of a video, upright.

    Args:
        path: the video.
        clip: result of :func:`read_clip`.
        frames: indices into ``clip``.
        change: applied to each when it is decoded, so that large frames need not be kept.

    Returns:
        What ``change`` makes of u8[H, W, 3] of each.

    Raises:
        ImageError: one can't be decoded; the message is the reason.
    """
    wanted = sorted({int(clip.pts[i]) for i in frames})
    found: dict[int, np.ndarray] = {}

    def keep(decoded: Iterator[tuple[int, Any]]) -> None:
        for stamp, frame in decoded:
            if stamp in wanted and stamp not in found:
                found[stamp] = change(_upright(frame))

    if clip.is_timed:
        # After a seek, frames may refer to some before it; decoding all of them then helps.
        with contextlib.suppress(ImageError), _opened(path) as opened:
            keep(_by_seeking(*opened, clip, wanted))
    if len(found) < len(wanted):
        with _opened(path) as opened:
            keep(_in_order(*opened, clip.is_timed, wanted[-1]))
    missing = [i for i in frames if int(clip.pts[i]) not in found]
    if missing:
        raise ImageError(f"frame {missing[0] + 1} of {len(clip.pts)} can't be decoded")
    return [found[int(clip.pts[i])] for i in frames]


def _by_seeking(
    container: Any, stream: Any, clip: Clip, wanted: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """Decode from the last key frame before each wanted one, unless that was passed already:
    timestamps and frames."""
    keys, place = clip.pts[clip.is_key], int(clip.pts[0]) - 1
    frames: Iterator[Any] = iter(())
    for target in wanted:
        before = int(np.searchsorted(keys, target, side="right"))
        key = int(keys[before - 1] if before else clip.pts[0])
        if key > place:
            container.seek(key, stream=stream)
            frames = container.decode(stream)
        while place < target and (frame := next(frames, None)) is not None:
            if frame.pts is not None:
                place = frame.pts
                yield place, frame


def _in_order(container: Any, stream: Any, is_timed: bool, last: int) -> Iterator[tuple[int, Any]]:
    """Decode all frames up to the last wanted one: timestamps and frames."""
    for i, frame in enumerate(container.decode(stream)):
        stamp = frame.pts if is_timed else i
        if stamp is not None:
            yield stamp, frame
        if stamp == last:
            break


def _upright(frame: Any) -> np.ndarray:
    if frame.is_corrupt:
        raise ImageError("a damaged frame")
    for side in frame.side_data:
        if side.type.name == "DISPLAYMATRIX":
            a, b, _, c, d = np.frombuffer(side, "<i4").astype(np.float64)[:5]
            if a * d < b * c:
                raise ImageError("a video that is shown mirrored; save it as it is to be seen")
    pixels = frame.to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, frame.rotation // 90))


@contextlib.contextmanager
def _opened(path: str, max_pixels: int = 2**31 - 1) -> Iterator[tuple[Any, Any]]:
    """Open a file and its video stream; what FFmpeg raises meanwhile becomes an ImageError."""
    try:
        import av
    except ImportError:
        raise DataError(
            f"{shown(path)}: videos are read by PyAV; install it: pip install 'jaxvlm[video]'"
        ) from None
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
        except UnicodeError:
            raise ImageError("can't be decoded: a damaged header") from None
        except (av.FFmpegError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ImageError(f"not a video that FFmpeg can read: {reason}") from None
        try:
            streams = [
                s for s in container.streams.video if not s.disposition & s.disposition.attached_pic
            ]
            if not streams:
                raise ImageError("a file without a video")
            if streams[0].codec_context is None:
                raise ImageError("can't be decoded: FFmpeg has no decoder for it")
            # What a decoder can't repair is to be an error: FFmpeg would show grey blocks.
            # A larger frame than the header's is one, too.
            limit = {"max_pixels": str(min(max_pixels, 2**31 - 1))}
            streams[0].codec_context.options = {"err_detect": "explode", **limit}
            yield container, streams[0]
        except ImageError:
            raise
        except av.FFmpegError as error:
            reason = error.strerror or str(error)
            raise ImageError(f"can't be decoded: {reason}") from None
        except (ValueError, MemoryError, UnicodeError) as error:
            raise ImageError(f"can't be decoded: {error or type(error).__name__}") from None
