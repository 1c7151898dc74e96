"""Pictures with a caption each, from the package registries: emoji, and Debian's stamps.

    python -m benchmarks.captions emoji FOLDER

``emoji``: the 64-pixel pictures of npm's ``emoji-datasource-google`` (Noto; Apache-2.0, data MIT)
with their English names; without the variants that differ in skin alone. ``stamps``: those of
Debian's ``tuxpaint-stamps-default`` (GPL-2) with their English sentences. One in six is held out:
FOLDER/train.jsonl and FOLDER/test.jsonl have ``query_image``, ``positive`` and ``id``.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import pathlib
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from typing import IO

from PIL import Image

PACKAGES = {"emoji": "emoji-datasource-google@16.0.0", "stamps": "tuxpaint-stamps-default"}
HELD_OUT = 6
Captioned = Iterator[tuple[str, str, bytes]]
"""(id, caption, PNG)."""


def emoji(there: pathlib.Path) -> Captioned:
    """Of an npm package, fetched by npm."""
    subprocess.run(["npm", "pack", "--silent", PACKAGES["emoji"]], cwd=there, check=True)
    (path,) = there.glob("*.tgz")
    with tarfile.open(path) as tar:
        listed = json.load(_file(tar, "package/emoji.json"))
        for entry in sorted(listed, key=lambda e: e["sort_order"]):
            if entry["has_img_google"]:
                name = (entry["name"] or entry["short_name"].replace("_", " ")).lower()
                data = _file(tar, f"package/img/google/64/{entry['image']}").read()
                yield entry["unified"].lower(), name, data


def stamps(there: pathlib.Path) -> Captioned:
    """Of a Debian package, fetched by apt."""
    subprocess.run(["apt-get", "download", "-qq", PACKAGES["stamps"]], cwd=there, check=True)
    (path,) = there.glob("*.deb")
    out = there / "data"
    subprocess.run(["dpkg-deb", "-x", str(path), str(out)], check=True)
    for png in sorted(out.rglob("*.png")):
        text = png.with_suffix(".txt")
        caption = text.read_text(encoding="utf-8", errors="replace") if text.exists() else ""
        if first := caption.split("\n")[0].strip():
            yield str(png.relative_to(out).with_suffix("")).replace("/", "-"), first, _square(png)


def _square(path: pathlib.Path) -> bytes:
    """At most 128 pixels a side, on white."""
    picture = Image.open(path).convert("RGBA")
    picture.thumbnail((128, 128))
    canvas = Image.new("RGBA", (128, 128), "white")
    canvas.alpha_composite(picture, tuple((128 - n) // 2 for n in picture.size))
    data = io.BytesIO()
    canvas.convert("RGB").save(data, "PNG")
    return data.getvalue()


def _file(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    found = tar.extractfile(name)
    assert found is not None, name
    return found


def write(kind: str, folder: pathlib.Path) -> dict[str, int]:
    """Fetch and write; returns how many of each part."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "test": []}
    with tempfile.TemporaryDirectory() as there:
        seen: set[str] = set()
        for identifier, caption, data in {"emoji": emoji, "stamps": stamps}[kind](
            pathlib.Path(there)
        ):
            name = f"pictures/{identifier}.png"
            (folder / name).write_bytes(data)
            if caption in seen:
                continue  # whose picture it is could not be told
            seen.add(caption)
            digest = int(hashlib.sha256(caption.encode()).hexdigest(), 16)
            record = {"id": identifier, "query_image": name, "positive": caption}
            part = "test" if digest % HELD_OUT == 0 else "train"
            lines[part].append(json.dumps(record, ensure_ascii=False))
    for part, found in lines.items():
        (folder / f"{part}.jsonl").write_text("\n".join(found) + "\n", encoding="utf-8")
    return {part: len(found) for part, found in lines.items()}


def main() -> None:
    """Prepare one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kind", choices=tuple(PACKAGES))
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    print(write(args.kind, args.folder))


if __name__ == "__main__":
    main()
