"""How records name their images and videos, and which of them stands at which mark."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Sequence
from typing import Any

from jaxvlm.data.image_placeholders import BOTH_MARKS, MARK, VIDEO_MARK
from jaxvlm.data.sources.fields import DEFAULT, OF_IMAGE, Allowed, BadItem, is_empty
from jaxvlm.data.sources.member_names import InFile, as_video, bare, is_file, is_video

LISTS = {"image": ("images", "image"), "video": ("videos", "video")}
"""Kind -> fields of a record that name files of it."""
IN_LISTS = frozenset(LISTS["image"] + LISTS["video"])
_NAMES = {
    "image": ("image", "path", "url", "image_url"),
    "video": ("video", "path", "url", "video_url"),
}
"""Kind -> fields of a content part that name its file."""
PARTS = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Type of a content part -> its kind."""
FIELDS_OF_PART = {
    "text": frozenset(["type", "text"]),
    **dict.fromkeys(("image", "image_url"), frozenset(["type", *_NAMES["image"]])),
    **dict.fromkeys(("video", "video_url"), frozenset(["type", *_NAMES["video"]])),
}
MARKS = {"image": MARK, "video": VIDEO_MARK}
"""Kind -> its mark in a text."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def of_part(part: dict[str, Any], allowed: Allowed) -> str:
    """File that an image or video part names; without a name if it takes the record's next."""
    kind = PARTS[part["type"]]
    given = [key for key in _NAMES[kind] if not is_empty(part.get(key))]
    if len(given) > 1:
        raise BadItem(f"both {' and '.join(map(repr, given))}; which one is meant?")
    name = _named(part[given[0]], kind, allowed) if given else ""
    return as_video(name) if kind == "video" else name


def listed(item: dict[str, Any], kind: str, allowed: Allowed) -> list[str]:
    """Files of a kind in the record's own fields."""
    given = [item[key] for key in LISTS[kind] if not is_empty(item.get(key))]
    if not given:
        return []
    if len(given) > 1:
        raise BadItem(f"both '{kind}' and '{kind}s'; which one is meant?")
    raw = given[0]
    names = [_named(name, kind, allowed) for name in (raw if isinstance(raw, list) else [raw])]
    return list(map(as_video, names)) if kind == "video" else names


def _named(value: Any, kind: str, allowed: Allowed) -> str:
    """File that a name, or an object with one name, stands for."""
    article = {"image": "an image", "video": "a video"}[kind]
    if isinstance(value, dict):
        fields = ("path", "url", kind, "bytes")
        value = allowed.fields_of(kind, value, fields, OF_IMAGE)
        given = [value[key] for key in fields if not is_empty(value.get(key))]
        if len(given) > 1:
            raise BadItem(f"{article} with several names or contents; which one is meant?")
        if isinstance(data := value.get("bytes"), str) and data and is_file(data):
            raise BadItem(f"{article}'s bytes as text; give them as a data: URI")
        value = given[0] if given else None
    return file_name(value, allowed, article)


def file_name(value: Any, allowed: Allowed = DEFAULT, article: str = "an image") -> str:
    """Check and return the file that a record names for an image or a video; raises BadItem."""
    if not isinstance(value, str) or not value:
        detail = f"{type(value).__name__}; {article} must be a file, given by its name"
        raise BadItem(f"{article}'s name is not text", detail)
    if isinstance(value, InFile):
        return value
    if value[:7].lower() == "file://":
        value = value[7:]
        if "%" in value and not os.path.exists(value):
            value = urllib.parse.unquote(value)  # as a URL has it, and few tools write it
    if _URL.match(value.strip()):
        is_web = value.strip().lower().startswith(("http://", "https://"))
        if allowed.of_url and is_web:
            return InFile(allowed.of_url(value.strip(), article))
        hint = "; `jaxvlm data fetch` keeps it, and data.fetched names the folder" * is_web
        raise BadItem(f"{article} that is not a file", value[:60] + hint)
    return value


def in_order(
    texts: Sequence[str],
    inline: Sequence[str],
    images: Sequence[str],
    videos: Sequence[str],
    allowed: Allowed,
) -> tuple[list[str], list[str]]:
    """Find which file stands at which mark.

    Args:
        texts: of all turns, with ``<image>`` and ``<video>`` marks.
        inline: files that content lists name, those without a name take the record's next one.
        images: files that the record names.
        videos: the same of videos.
        allowed: whether ``<video>`` is a text.

    Returns:
        The texts, in which a video, too, is marked by ``<image>``; and the files, as many as the
        record has, in order of their marks if there are any.

    Raises:
        BadItem: marks and files do not fit together.
    """
    missing = sum(not bare(name) for name in inline)
    if missing not in (0, len(inline)) or (inline and not missing and (images or videos)):
        raise BadItem("images named both in the content and in 'images'")
    has_video = bool(videos) or any(map(is_video, inline))
    marks = [mark for text in texts for mark in BOTH_MARKS.findall(text)]
    if VIDEO_MARK in allowed.literal:
        if has_video:
            raise BadItem("a video, and '<video>' in data.literal_markers")
        return list(texts), list(inline) if inline and not missing else list(images)
    plain = [text.replace(VIDEO_MARK, MARK) for text in texts]
    if inline and not missing:
        names = list(inline)
    elif not marks:
        return plain, [*images, *videos]
    elif not images and VIDEO_MARK not in marks:  # as LLaVA-Video's files have it
        names = list(videos)
    else:
        names, rest = [], {MARK: list(images), VIDEO_MARK: list(videos)}
        for mark, what in ((MARK, "images"), (VIDEO_MARK, "videos")):
            if marks.count(mark) != len(rest[mark]):
                detail = f"{marks.count(mark)} placeholders, {len(rest[mark])} {what}"
                is_text = mark == VIDEO_MARK and not videos
                detail += "; data.literal_markers can keep '<video>' as a text" * is_text
                raise BadItem(f"placeholders and {what} differ in number", detail)
        names = [rest[mark].pop(0) for mark in marks]
        return plain, names
    kinds = [is_video(name) for name in names]
    if VIDEO_MARK in marks and [mark == VIDEO_MARK for mark in marks] != kinds:
        detail = f"{marks.count(VIDEO_MARK)} placeholders, {sum(kinds)} videos"
        raise BadItem("placeholders and videos differ in number", detail)
    return plain, names
