"""Which fields of a record, a turn or a content part are read, and what happens to the others.

A field that nobody reads may say what is to be trained, so ignoring it would silently train
something else. Hence every field is read, known to be harmless, named in ``data.ignored_fields``,
empty, or a reason to refuse the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

HARMLESS = frozenset(
    [
        # Which record it is. (``id`` itself is read.)
        *("_id", "uid", "uuid", "guid", "idx", "index", "question_id", "sample_id", "image_id"),
        # Where the record comes from.
        *("source", "data_source", "dataset", "dataset_name", "dataset_id", "subset", "split"),
        *("license", "author", "annotator", "annotator_id", "created_at", "timestamp"),
        # What it is about.
        *("category", "topic", "domain", "difficulty", "language", "lang"),
        # The size of its image, which is read from the image itself.
        *("height", "width", "image_height", "image_width"),
        # Notes in any form.
        *("metadata", "meta", "comment", "comments"),
    ]
)
"""Names of fields that describe a record and can't mean that it is trained otherwise."""


class BadItem(Exception):
    """An item that is not a valid record.

    Args:
        reason: short reason; the same words for all items with the same fault.
        detail: specifics of this item.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def is_empty(value: Any) -> bool:
    """Whether a field is as good as not there; an array is compared with nothing."""
    return value is None or (isinstance(value, str | bytes | list | dict) and not value)


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Fields that may occur beside those that are read."""

    ignored: frozenset[str] = HARMLESS
    """Names of fields that are passed over, at every level of a record."""

    @classmethod
    def of(cls, ignored_fields: Collection[str]) -> Allowed:
        """Return the harmless fields and those of ``data.ignored_fields``."""
        return cls(HARMLESS | frozenset(ignored_fields))

    def refuse_others(self, level: str, item: Mapping[str, Any], read: Collection[str]) -> None:
        """Refuse an item with a field that is neither read nor passed over, unless it is empty.

        Args:
            level: what the item is: 'record', 'turn', 'content part', ...
            item: the fields.
            read: names of the fields that are read.

        Raises:
            BadItem: the item has such a field; the detail names it.
        """
        others = sorted(
            str(name)
            for name, value in item.items()
            if name not in read and name not in self.ignored and value not in (None, "", [], {})
        )
        if others:
            raise BadItem(
                f"a field of the {level} that jaxvlm does not read; data.ignored_fields can pass "
                "over it",
                ", ".join(others),
            )


DEFAULT = Allowed()
