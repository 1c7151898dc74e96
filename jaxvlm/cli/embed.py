"""``jaxvlm embed``."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_model, load_model, say

SUMMARY = "Write vectors of texts and pictures."
USAGE = "--checkpoint=FOLDER [--texts=FILE] [--images=FILE] --output=FILE.npy"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``embed``."""
    define_model(values, adapters=False)
    flags.DEFINE_multi_string("text", [], "A text", flag_values=values)
    flags.DEFINE_string("texts", "", "File with a text a line.", flag_values=values)
    flags.DEFINE_multi_string("image", [], "A picture file", flag_values=values)
    flags.DEFINE_string(
        "images",
        "",
        "File with a picture's path a line, relative to the file's folder.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "output",
        "",
        "FILE.npy, f32[N, E]; or FILE.jsonl, a line each with the text or picture and its vector. "
        "Texts come first, then pictures, in the order given.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "batch_size", 64, "Texts or pictures at a time, over all devices.", flag_values=values
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Embed, and say what was written."""
    import pathlib

    import numpy as np

    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"embed takes flags only, not {args[0]!r}")
    output = pathlib.Path(values.output)
    if output.suffix not in (".npy", ".jsonl"):
        raise ConfigError(f"embed needs --output=FILE.npy or FILE.jsonl, not {values.output!r}")
    texts = [*values.text, *_lines("texts", values.texts)]
    root = pathlib.Path(values.images).parent
    images = [*values.image, *(str(root / line) for line in _lines("images", values.images))]
    if not texts and not images:
        raise ConfigError("embed needs texts (--text, --texts) or pictures (--image, --images)")
    model = load_model("embed", values)
    parts = []
    if texts:
        parts.append(model.encode_text(texts, values.batch_size))
    if images:
        parts.append(model.encode_image(images, values.batch_size))
    vectors = np.concatenate(parts)
    _write(output, texts, images, vectors)
    say(f"{len(vectors)} vectors of {vectors.shape[1]} dims: {output}")
    return {"texts": len(texts), "images": len(images), "dims": vectors.shape[1]}


def _lines(flag: str, name: str) -> list[str]:
    """The lines of a file, none of them empty; [] where no file is named."""
    import pathlib

    from jaxvlm.config import ConfigError

    if not name:
        return []
    try:
        lines = pathlib.Path(name).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{flag}={name} can't be read: {error}") from None
    lines = lines[:-1] if not lines[-1] else lines
    lines = [line.removesuffix("\r") for line in lines]
    if blank := [i + 1 for i, line in enumerate(lines) if not line.strip()]:
        raise ConfigError(f"--{flag}={name}: line {blank[0]} is empty; vectors go by lines")
    return lines


def _write(output: Any, texts: list[str], images: list[str], vectors: Any) -> None:
    """Whole or not at all; process 0 writes."""
    import json

    import jax
    import numpy as np

    if jax.process_index():
        return
    half = output.with_name(output.name + ".tmp")
    output.parent.mkdir(parents=True, exist_ok=True)
    with half.open("wb") as file:
        if output.suffix == ".npy":
            np.save(file, vectors)
        else:
            items = [*({"text": t} for t in texts), *({"image": i} for i in images)]
            for item, vector in zip(items, vectors.tolist(), strict=True):
                line = json.dumps(item | {"vector": vector}, ensure_ascii=False)
                file.write(line.encode() + b"\n")
    half.rename(output)
