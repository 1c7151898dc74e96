"""Files that `jaxvlm data fetch` has kept of images and videos that records name by URL."""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import urllib.parse
from collections.abc import Callable

from jaxvlm.config import DataConfig
from jaxvlm.data.sources.fields import BadItem

OfUrl = Callable[[str, str], str]
"""(URL, ``an image`` or ``a video``) -> the name of its file; raises BadItem."""
_SUFFIX = re.compile(r"\.[a-z0-9]{1,5}")


def path_of(folder: str | os.PathLike[str], url: str) -> pathlib.Path:
    """The file in which a folder keeps what a URL gave."""
    digest = hashlib.blake2b(url.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    try:
        suffix = pathlib.PurePosixPath(urllib.parse.urlsplit(url).path).suffix.lower()
    except ValueError:  # no URL at all
        suffix = ""
    name = digest + (suffix if _SUFFIX.fullmatch(suffix) else "")
    return pathlib.Path(folder).expanduser() / digest[:2] / name


def of_config(config: DataConfig) -> OfUrl | None:
    """How ``data.fetched`` names the files of URLs; ``None`` without it."""
    if not config.fetched:
        return None

    def file_of(url: str, article: str) -> str:
        path = path_of(config.fetched, url)
        if not path.is_file():
            raise BadItem(f"{article} that was not fetched", url[:200])
        return str(path)

    return file_of
