"""Images of a packed set: as they are, in tar files of about equal size that any tool lists."""

from __future__ import annotations

import hashlib
import io
import pathlib
import tarfile
from collections.abc import Iterable, Sequence

from jaxvlm.data.errors import DataError, ImageError
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.member_names import Member, as_video, is_video, shown


def write(
    folder: pathlib.Path, paths: Sequence[str], used: Iterable[int], shard_bytes: int
) -> list[str]:
    """Write images into tar files.

    Args:
        folder: where they are made.
        paths: all images.
        used: indices into ``paths`` of those to write, in the order in which they will be read.
        shard_bytes: size of a tar file, about.

    Returns:
        For each of ``paths``, its name (see ``member_names``) without the folder; "" for those that
        are not written.

    Raises:
        DataError: an image can't be read any more.
    """
    names = [""] * len(paths)
    with _Shards(folder, shard_bytes) as shards:
        for number, image in enumerate(used):
            try:
                names[image] = shards.add(number, paths[image])
            except ImageError as error:
                text = f"{shown(paths[image])}: {error}; it could be read before"
                raise DataError(text) from None
    return names


class _Shards:
    """Tar files into which images are written one after another.

    Args:
        folder: where they are.
        size: of a file, about, in bytes.
    """

    def __init__(self, folder: pathlib.Path, size: int):
        self._folder, self._size = folder, size
        self._tar: tarfile.TarFile | None = None
        self._count = 0

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tar is not None:
            self._tar.close()

    def add(self, number: int, path: str) -> str:
        """Write an image as it is; returns its name."""
        data, (own, _) = image_files.read_bytes(path), image_files.name_and_size(path)
        if self._tar is None or self._tar.offset > self._size:
            self.__exit__()
            self._name = f"images-{self._count:05d}.tar"
            self._tar = tarfile.TarFile(self._folder / self._name, "w", format=tarfile.PAX_FORMAT)
            self._count += 1
        info = tarfile.TarInfo(f"{number:09d}/{own}")
        info.size = len(data)
        place = self._tar.offset + len(
            info.tobuf(self._tar.format, self._tar.encoding or "utf-8", self._tar.errors)
        )
        self._tar.addfile(info, io.BytesIO(data))
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        name = str(Member(self._name, str(place), len(data), own, digest))
        return as_video(name) if is_video(path) else name
