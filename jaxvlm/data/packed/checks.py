"""What is compared when a packed set is opened, and when a batch is read of it."""

from __future__ import annotations

import hashlib
import json
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.sources.downloads import digest_of_file
from jaxvlm.data.sources.member_names import is_remote, shown
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.data.tokenizer.text_tokenizer import TextTokenizer
from jaxvlm.types import Span

OF_READING = (
    *("image_root", "fetched", "column_mapping", "ignored_fields", "literal_markers"),
    *("tsv_quoting", "format"),
)
"""Settings of how files are read; with a packed set they are for the evaluation data."""
_PROBED = 16  # images, at most, whose tokens are counted again when a set is opened


def tokenizer_digest(tokenizer: ChatTokenizer | TextTokenizer) -> str:
    """Hash of all that token ids follow from; it is the same for a copy that was saved and read."""
    backend = json.loads(tokenizer.backend.to_str())
    unread = ("truncation", "padding", "decoder", "version")  # for other calls than ours
    parts = {name: value for name, value in backend.items() if name not in unread}
    if isinstance(tokenizer, ChatTokenizer):
        own: list[Any] = [
            tokenizer.template,
            sorted(tokenizer.special.items()),
            list(tokenizer.style),
        ]
    else:
        length, sees_padding, clean = tokenizer.style
        own = [tokenizer.pad_id, length, sees_padding, clean.__qualname__]
    text = json.dumps([parts, *own], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def check_settings(
    spec: str, packed: dict[str, Any], wanted: dict[str, Any], config: DataConfig
) -> None:
    """Refuse a set that was packed for other settings, and settings that are not read with one.

    Args:
        spec: its folder or URL.
        packed: what its contents are a function of.
        wanted: the same for the run.
        config: data settings of the run.

    Raises:
        DataError: which, and what to do.
    """
    for name in OF_READING:
        if getattr(config, name) != getattr(DataConfig(), name) and not config.eval:
            raise DataError(f"data.{name} is not read: {spec} is packed; leave it out")
    names = sorted(packed.keys() | wanted.keys())
    changed = {
        name: f"{name} {packed.get(name)!r} -> {wanted.get(name)!r}"
        for name in names
        if packed.get(name) != wanted.get(name)
    }
    if changed:
        told, hint = ", ".join(changed.values()), any(n.endswith("tokenizer") for n in changed)
        raise DataError(
            f"{spec} was packed for other settings: {told}; set them as they were, or pack the "
            "data again with this recipe" + _OTHER_TOKENIZER * hint
        )


_OTHER_TOKENIZER = (
    ". The tokenizer is that of the run's folder, config.tokenizer.path, the checkpoint or "
    "config.init_from: a run that was begun on other data keeps its own"
)


def damaged(what: str, spec: str, folder: pathlib.Path) -> DataError:
    """The error of what is not as it was packed; a copy of it is downloaded again.

    Args:
        what: of the set.
        spec: its folder or URL.
        folder: where its arrays are.
    """
    copied = f"remove {folder}, from where it is copied again; "
    return DataError(
        f"{spec}: {what} is not as it was packed; {copied * is_remote(spec)}`jaxvlm data verify "
        f"{spec}` lists the damaged files"
    )


def check_files(
    spec: str, folder: pathlib.Path, files: Mapping[str, Sequence[Any]], names: Iterable[str]
) -> None:
    """Compare files with their digests: those that are read whole anyway.

    Args:
        spec: the set's folder or URL.
        folder: where its arrays are.
        files: size and digest of each.
        names: of those to compare.

    Raises:
        DataError: one is not as it was packed.
    """
    for name in names:
        if digest_of_file(folder / name) != files[name][1]:
            raise damaged(name, spec, folder)


def of_span(span: Span) -> int:
    """The checksum of an image's tokens."""
    inside: tuple[Any, ...] = span.sources or ()
    found = zlib.crc32(repr((int(span.advance), span.lead, inside[2:])).encode())
    for leaf in (span.ids, span.tile, span.positions, *inside[:2]):
        if leaf is not None:
            found = zlib.crc32(f"{leaf.shape} {leaf.dtype}".encode() + leaf.tobytes(), found)
    return found


class SpanChecksums:
    """Checksums of spans of one set, of which equal ones are one object that lives as long."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def of(self, span: Span) -> int:
        """The checksum of a span, computed once."""
        if id(span) not in self._known:
            self._known[id(span)] = of_span(span)
        return self._known[id(span)]


def holds(found: Callable[[], int], known: np.ndarray, index: int) -> bool:
    """Whether a checksum is the known one; False where it can't be computed."""
    try:
        return found() == int(known[index])
    except (LookupError, ValueError, OverflowError):  # places that can't be
        return False


def probes(spans: Sequence[Span], used: Iterable[int]) -> list[int]:
    """Some images of different spans, evenly chosen: what a run compares when it opens the set.

    Args:
        spans: token span of each image.
        used: indices of the images that are packed.
    """
    first: dict[int, int] = {}
    for image in used:
        first.setdefault(id(spans[image]), image)
    of_each = list(first.values())
    return of_each[:: -(-len(of_each) // _PROBED) or 1]


def probe(
    spec: str,
    folder: pathlib.Path,
    paths: Sequence[str],
    spans: Sequence[Span],
    images: Iterable[int],
    measure: Callable[[str], Span],
) -> None:
    """Refuse a set whose images have other tokens than the run's model gives them.

    Args:
        spec: the set's folder or URL.
        folder: where its arrays are.
        paths: its images.
        spans: their packed token spans.
        images: result of :func:`probes`.
        measure: returns the token span of an image in the run's model.

    Raises:
        DataError: one has others.
    """
    for image in images:
        try:
            path, known = paths[image], spans[image]
        except (LookupError, ValueError):
            raise damaged(f"image {image}", spec, folder) from None
        try:
            span = measure(path)
        except ImageError:
            continue  # the run skips or refuses its records
        if of_span(span) != of_span(known):
            raise DataError(
                f"{spec}: {shown(path)} has {len(known.ids)} tokens there, and in this model "
                f"{len(span.ids)}, or others; pack the data again with this recipe (`jaxvlm data "
                f"verify {spec}` tells whether the set is damaged)"
            )
