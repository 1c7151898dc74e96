"""``jaxvlm embed``."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_model, load_model, say

SUMMARY = "Write vectors of texts, pictures, or both together."
USAGE = (
    "--checkpoint=FOLDER [--texts=FILE] [--images=FILE] [--input=FILE.jsonl] "
    "--output=FILE.npy|npz|safetensors|parquet|jsonl"
)


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``embed``."""
    define_model(values)
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
        "input",
        "",
        "FILE.jsonl, .csv, .parquet or .tar: `text`, `image` (a path, relative to the file's "
        "folder), or both; `instruction`, `id`.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "output",
        "",
        "FILE.npy, [N, E]; FILE.npz and FILE.safetensors, the same as `vectors`; FILE.parquet and "
        "FILE.jsonl, a row each with id, text and picture as far as given, and `vector`. Texts "
        "come first, then pictures, then the items of --input, in the order given.",
        flag_values=values,
    )
    flags.DEFINE_integer("batch_size", 64, "Items at a time, over all devices.", flag_values=values)
    flags.DEFINE_integer(
        "dims",
        0,
        "Keep the first so many dims of a vector, of unit length again (Matryoshka); 0 is all.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "quantize",
        "",
        "int8, a byte a dim; binary or ubinary, a bit a dim in signed or unsigned bytes; as "
        "sentence-transformers writes them.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "ranges",
        "",
        "For int8: a file that embed wrote with --quantize=int8, whose ranges to use (queries take "
        "their corpus's); or FILE.npy, f32[2, E]. If not given, the least and greatest of these "
        "vectors.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "instruction",
        "",
        "What the vectors are for, of items that do not say it themselves: a decoder's system "
        "turn, or a text encoder's prompt in front of the text: end it with a space.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "part_size",
        4096,
        "Items between two writes to OUTPUT.parts, from which an interrupted run goes on.",
        flag_values=values,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Embed, and say what was written."""
    import pathlib

    from jaxvlm.build import embedding, items
    from jaxvlm.config import ConfigError
    from jaxvlm.data.examples import Item
    from jaxvlm.io import vectors

    if args:
        raise ConfigError(f"embed takes flags only, not {args[0]!r}")
    output = pathlib.Path(values.output)
    vectors.check(output)
    if blank := [text for text in values.text if not text.strip()]:
        raise ConfigError(f"--text={blank[0]}: it is empty")
    asked = [Item(text=text) for text in [*values.text, *_lines("texts", values.texts)]]
    root = pathlib.Path(values.images).parent
    images = [*values.image, *(str(root / line) for line in _lines("images", values.images))]
    asked += [Item(image=image) for image in images]
    ids = [""] * len(asked)
    if values.input:
        found, names = items.read(values.input)
        asked, ids = asked + found, ids + names
    if not asked:
        raise ConfigError(
            "embed needs texts (--text, --texts), pictures (--image, --images) or both (--input)"
        )
    ranges = vectors.read_ranges(values.ranges) if values.ranges else None
    model = load_model("embed", values)
    how = embedding.Embedding(values.batch_size, values.dims, values.instruction, values.part_size)
    size = values.dims or model.width
    embedding.check(len(asked), size, values.quantize, ranges)
    folder = output.with_name(output.name + ".parts")
    parts = embedding.in_parts(model, asked, folder, how, values.checkpoint)
    rows = [
        {
            n: x
            for n, x in (("id", id), ("text", item.words and item.text), ("image", item.image))
            if x
        }
        for id, item in zip(ids, asked, strict=True)
    ]
    count, width = embedding.write(parts, rows, output, values.quantize, ranges)
    kind = values.quantize or "float32"
    say(f"{count} vectors of {size} dims in {kind}: {output}")
    return {
        "texts": sum(not item.image for item in asked),
        "images": sum(bool(item.image) for item in asked),
        "dims": size,
        "columns": width,
        "kind": kind,
    }


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
