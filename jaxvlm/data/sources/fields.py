"""Which fields of a record, a turn or a content part are read, and what happens to the others.

A field that nobody reads may say what is to be trained, so ignoring it would silently train
something else. Hence every field is read, known to be harmless, named in ``data.ignored_fields``,
empty, or a reason to refuse the record.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import numbers
import unicodedata
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxvlm.config import DataConfig
from jaxvlm.data import image_placeholders
from jaxvlm.data.errors import DataError
from jaxvlm.data.sources.member_names import InFile

HARMLESS: dict[str, tuple[str, ...]] = {
    "which record it is": (
        *("_id", "uid", "uuid", "guid", "idx", "index"),
        *("question_id", "sample_id", "image_id"),
    ),
    "where it comes from": (
        *("source", "data_source", "dataset", "dataset_name", "dataset_id", "subset", "split"),
        *("license", "author", "annotator", "annotator_id", "created_at", "timestamp"),
    ),
    "what it is about": ("category", "topic", "domain", "difficulty", "language", "lang"),
    "the size of its image, which is read from the image": (
        *("height", "width", "image_height", "image_width"),
    ),
    "notes": ("metadata", "meta", "comment", "comments"),
}
"""What a field of these names says -> the names: it can't mean that a record is trained otherwise.
(``id`` is read; of ``split``, see :class:`Splits`.)"""
OF_RECORD: frozenset[str] = frozenset().union(*HARMLESS.values())
"""Harmless names of a record's fields, and of an item's that is an object."""
OF_TURN = OF_RECORD - {"index", "image_id"}
"""Harmless names of a turn's fields; those left out may choose its image."""
OF_IMAGE = frozenset(
    HARMLESS["the size of its image, which is read from the image"] + HARMLESS["notes"]
)
"""Harmless names of a content part's or an image's fields. Others choose the image: Anthropic's
``source`` has its content."""


class BadItem(Exception):
    """An item that is not a valid record.

    Args:
        reason: short reason; the same words for all items with the same fault.
        detail: specifics of this item.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


_TRAINING, _EVALUATION = "train", "eval"
_MEANT_FOR = {
    **dict.fromkeys(("train", "training"), _TRAINING),
    **dict.fromkeys(("test", "testing", "val", "valid", "validation", "dev", "eval"), _EVALUATION),
}
"""Names of splits -> the setting of ``data`` that names such records."""


class Splits:
    """What the records of a file say in ``split``: which part of a data set they belong to.

    A file of several parts is not what anyone means to train or evaluate on, and the field, which
    is harmless otherwise, would be passed over.

    Args:
        spec: the file, or a pattern of files.
        config: data settings, which say what the file is for.
    """

    def __init__(self, spec: str, config: DataConfig):
        self.spec, self.config = spec, config
        self.counts: collections.Counter[str] = collections.Counter()

    def add(self, fields: Mapping[str, Any]) -> None:
        """Count a record's own, if it has one that is not to be ignored."""
        value = fields.get("split")
        if not is_empty(value) and "split" not in self.config.ignored_fields:
            self.counts[name_of(value) or str(value)[:60]] += 1

    def check(self) -> None:
        """Refuse records of several splits, or of one that is meant for something else.

        Raises:
            DataError: which, how many of each, and what to do.
        """
        named = ", ".join(f"{name!r} ({count:,})" for name, count in self.counts.most_common(5))
        way_out = (
            "keep those that are meant, in a file of their own, or set "
            "data.ignored_fields=('split',) to read them all"
        )
        if len(self.counts) > 1:
            more = ", ..." if len(self.counts) > 5 else ""
            raise DataError(f"{self.spec}: records of several splits: {named}{more}; {way_out}")
        train, evaluated = (self.spec == x for x in (self.config.train, self.config.eval))
        if train == evaluated:  # both, or neither
            return
        meant = _TRAINING if train else _EVALUATION
        for name in self.counts:
            if _MEANT_FOR.get(name.strip().lower(), meant) != meant:
                raise DataError(f"{self.spec} is data.{meant}, but its split is {named}; {way_out}")


def is_empty(value: Any) -> bool:
    """Whether a field is as good as not there; an array is compared with nothing."""
    return value is None or (isinstance(value, str | bytes | list | dict) and not value)


def name_of(value: Any) -> str | None:
    """The one text of an id or a label, by which two of them are the same or different.

    A number is its shortest decimal text, so that 1, 1.0 and "1" are one name, whatever wrote the
    file. Text is compared as it is, in Unicode's NFC: "1.0" and "01" are names of their own.

    Args:
        value: what a record gives.

    Returns:
        The text; ``None`` for what is neither text nor a finite number nor true or false.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real) and math.isfinite(value):
        number = float(value)
        return str(int(number)) if number.is_integer() else repr(number)
    if not isinstance(value, str) or isinstance(value, InFile):
        return None
    return unicodedata.normalize("NFC", value)


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Fields that may occur beside those that are read."""

    ignored: frozenset[str] = frozenset()
    """Names of fields that are passed over at every level of a record."""
    literal: frozenset[str] = frozenset()
    """Image markers of other formats that are text."""
    of_url: Callable[[str, str], str] | None = None
    """Gives the file of an image at a URL, see :mod:`jaxvlm.data.sources.fetched`."""

    @classmethod
    def of(
        cls,
        ignored_fields: Collection[str],
        literal_markers: Collection[str] = (),
        of_url: Callable[[str, str], str] | None = None,
    ) -> Allowed:
        """Return what ``data.ignored_fields`` and ``data.literal_markers`` allow."""
        return cls(frozenset(ignored_fields), frozenset(literal_markers), of_url)

    def fields_of(
        self,
        level: str,
        item: Mapping[str, Any],
        read: Collection[str],
        harmless: Collection[str] = OF_RECORD,
    ) -> dict[str, Any]:
        """Return an item's fields that are read, and refuse others that are not passed over.

        Args:
            level: what the item is: 'record', 'turn', 'content part', ...
            item: the fields.
            read: names of the fields that are read.
            harmless: names that are harmless at this level.

        Returns:
            The fields in ``read``, without those that are ignored.

        Raises:
            BadItem: the item has a field that is neither read nor harmless, ignored or empty; the
                detail names it.
        """
        given = {name: value for name, value in item.items() if name not in self.ignored}
        others = sorted(
            str(name)
            for name, value in given.items()
            if not (name in read or name in harmless or is_empty(value))
        )
        if others:
            raise BadItem(
                f"a field of the {level} that jaxvlm does not read; data.ignored_fields can pass "
                "over it",
                ", ".join(others),
            )
        return {name: value for name, value in given.items() if name in read}

    def refuse_markers(self, text: str) -> None:
        """Refuse a text beside an image that marks the image's place as another format does.

        Args:
            text: text in which only ``<image>`` would be replaced by an image.

        Raises:
            BadItem: the text has another marker; the detail names it.
        """
        if others := [
            marker
            for marker in image_placeholders.foreign_markers(text)
            if marker not in self.literal
        ]:
            raise BadItem(
                "an image marker of another format, which would be text; "
                "data.literal_markers can keep it",
                others[0],
            )


DEFAULT = Allowed()
