"""Images with a caption each, from the package registries: emoji, and Debian's stamps.

    python -m benchmarks.captions emoji FOLDER

``emoji``: the 64-pixel images of npm's ``emoji-datasource-google`` (Noto; Apache-2.0, data MIT)
with their English names; without the variants that differ in skin alone. ``stamps``: those of
Debian's ``tuxpaint-stamps-default`` (GPL-2) with their English sentences. About one in six is held
out: FOLDER/train.jsonl and FOLDER/test.jsonl have ``query_image``, ``positive`` and ``id``.

What is alike is on one side (``groups``): names that differ in whom they show alone (``man
running``, ``woman running``), and images that are nearly the same.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pathlib
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np
from PIL import Image

PACKAGES = {"emoji": "emoji-datasource-google@16.0.0", "stamps": "tuxpaint-stamps-default"}
HELD_OUT = 6
ALIKE = 0.97
"""Correlation of two images at 16 x 16 pixels from which on they are nearly the same."""
_WHO = {"man", "men", "woman", "women", "boy", "girl", "person", "people", "adult", "child"}
_WHO |= {"facing", "right", "a", "an", "the"}


class Captioned(NamedTuple):
    """An image and its caption."""

    id: str
    caption: str
    png: bytes


def emoji(there: pathlib.Path) -> Iterator[Captioned]:
    """Of an npm package, fetched by npm."""
    subprocess.run(["npm", "pack", "--silent", PACKAGES["emoji"]], cwd=there, check=True)
    (path,) = there.glob("*.tgz")
    with tarfile.open(path) as tar:
        listed = json.load(_file(tar, "package/emoji.json"))
        for entry in sorted(listed, key=lambda e: e["sort_order"]):
            if entry["has_img_google"]:
                name = (entry["name"] or entry["short_name"].replace("_", " ")).lower()
                data = _file(tar, f"package/img/google/64/{entry['image']}").read()
                yield Captioned(entry["unified"].lower(), name, data)


def stamps(there: pathlib.Path) -> Iterator[Captioned]:
    """Of a Debian package, fetched by apt."""
    subprocess.run(["apt-get", "download", "-qq", PACKAGES["stamps"]], cwd=there, check=True)
    (path,) = there.glob("*.deb")
    out = there / "data"
    subprocess.run(["dpkg-deb", "-x", str(path), str(out)], check=True)
    for png in sorted(out.rglob("*.png")):
        text = png.with_suffix(".txt")
        caption = text.read_text(encoding="utf-8", errors="replace") if text.exists() else ""
        if first := caption.split("\n")[0].strip():
            name = str(png.relative_to(out).with_suffix("")).replace("/", "-")
            yield Captioned(name, first, _square(png))


def _square(path: pathlib.Path) -> bytes:
    """At most 128 pixels a side, on white."""
    image = Image.open(path).convert("RGBA")
    image.thumbnail((128, 128))
    canvas = Image.new("RGBA", (128, 128), "white")
    canvas.alpha_composite(image, tuple((128 - n) // 2 for n in image.size))
    data = io.BytesIO()
    canvas.convert("RGB").save(data, "PNG")
    return data.getvalue()


def _file(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    found = tar.extractfile(name)
    assert found is not None, name
    return found


def key(caption: str) -> str:
    """What a caption is about, without whom it shows: ``man running`` as ``woman running``."""

    def words(text: str) -> str:
        return " ".join(w for w in re.findall(r"\w+", text.lower()) if w not in _WHO)

    return words(caption.split(":")[0]) or words(caption) or "person"


def groups(found: Sequence[Captioned]) -> list[int]:
    """Numbers that are equal where two are alike, directly or through others.

    Args:
        found: captions of one :func:`key`, or images that correlate by ``ALIKE``, are alike.
    """
    seen = np.stack([_small(item.png) for item in found])
    parent, first = list(range(len(found))), {}

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, item in enumerate(found):
        parent[root(i)] = root(first.setdefault(key(item.caption), i))
    for i, j in np.argwhere(np.triu(seen @ seen.T > ALIKE, 1)).tolist():
        parent[root(i)] = root(j)
    return [root(i) for i in range(len(found))]


def _small(png: bytes) -> np.ndarray:
    """f32[768]: 16 x 16 pixels on white, of mean 0 and length 1."""
    image = Image.open(io.BytesIO(png)).convert("RGBA")
    canvas = Image.new("RGBA", image.size, "white")
    canvas.alpha_composite(image)
    small = canvas.convert("RGB").resize((16, 16), Image.Resampling.BOX)
    pixels = np.asarray(small, np.float32).ravel()
    pixels -= pixels.mean()
    return pixels / max(float(np.linalg.norm(pixels)), 1e-6)


def split(found: Sequence[Captioned]) -> list[str]:
    """``train`` or ``test`` of each; a group's is by its least caption, whatever else there is."""
    of = groups(found)
    least: dict[int, str] = {}
    for group, item in zip(of, found):
        least[group] = min(least.get(group, item.caption), item.caption)
    digests = {g: hashlib.sha256(name.encode()).hexdigest() for g, name in least.items()}
    return ["train" if int(digests[g], 16) % HELD_OUT else "test" for g in of]


def write(kind: str, folder: pathlib.Path) -> dict[str, int]:
    """Fetch and write; returns how many of each part."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    kept: dict[str, Captioned] = {}
    with tempfile.TemporaryDirectory() as there:
        for item in {"emoji": emoji, "stamps": stamps}[kind](pathlib.Path(there)):
            kept.setdefault(item.caption, item)  # whose another image is could not be told
    lines: dict[str, list[str]] = {"train": [], "test": []}
    found = list({item.png: item for item in reversed(kept.values())}.values())[::-1]
    for item, part in zip(found, split(found)):
        name = f"images/{item.id}.png"
        (folder / name).write_bytes(item.png)
        record = {"id": item.id, "query_image": name, "positive": item.caption}
        lines[part].append(json.dumps(record, ensure_ascii=False))
    for part, of_part in lines.items():
        (folder / f"{part}.jsonl").write_text("\n".join(of_part) + "\n", encoding="utf-8")
    return {part: len(of_part) for part, of_part in lines.items()}


def main() -> None:
    """Prepare one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=tuple(PACKAGES))
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    print(write(args.kind, args.folder))


if __name__ == "__main__":
    main()
