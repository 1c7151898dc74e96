"""The command ``jaxvlm embed``, which writes embeddings to a file."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli import common
from jaxvlm.cli.common import define_flags, define_model, flags_only, load_model, say

SUMMARY = "Write embeddings of texts, images, or both together."
USAGE = (
    "--checkpoint=FOLDER [--texts=FILE] [--images=FILE] [--input=FILE.jsonl] "
    "--output=FILE.npy|npz|safetensors|parquet|jsonl"
)
_FLAGS = {
    "text": "A text to embed; the flag can be repeated.",
    "texts": "A file with one text to embed per line.",
    "image": "An image file to embed; the flag can be repeated.",
    "images": "A file with the path of one image to embed per line, relative to the file's folder.",
    "input": "A .jsonl, .csv, .parquet or .tar file of items to embed: each record has `text`, "
    "`image` (a path relative to the file's folder) or both, and optionally `instruction` and "
    "`id`.",
    "output": "The file to write: .npy holds an array [N, E]; .npz and .safetensors hold the same "
    "array as `embeddings`; .parquet and .jsonl hold one record per item, with its id, text and "
    "image as far as given and its `embedding`. Texts come first, then images, then the items of "
    "--input, each in the given order.",
    "batch_size": "The number of items per batch, over all devices.",
    "dims": "Truncate each embedding to this many dims and normalize it to unit length "
    "(Matryoshka); 0 keeps all dims.",
    "quantize": "Quantize the embeddings as sentence-transformers does: int8 stores one byte per "
    "dim; binary and ubinary store one bit per dim in signed or unsigned bytes. By default they "
    "are float32.",
    "ranges": "The file to take int8 quantization ranges from: one that embed wrote with "
    "--quantize=int8 (queries use the ranges of their corpus), or a .npy file of f32[2, E]. By "
    "default they are the minimum and maximum of each dim over these embeddings.",
    "instruction": "The instruction for items that have none of their own: a decoder reads it as "
    "the system turn; a text encoder reads it directly before the text, so end it with a space. By "
    "default that of the run, or of the sentence-transformers folder, for --input_type.",
    "part_size": "The number of items between two writes to OUTPUT.parts, from which an "
    "interrupted run resumes.",
}

LOCAL = ("output",)
"""Flags that name what can't be in an object store."""


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``embed``."""
    define_model(values)
    common.define_reading(values)
    define_flags(values, _FLAGS, text=(), image=(), batch_size=64, dims=0, part_size=4096)
    flags.DEFINE_enum(
        "input_type",
        "",
        ["", "query", "document"],
        "What the items are, where the model embeds queries and documents differently: by another "
        "instruction, or to another maximum length.",
        flag_values=values,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Embed the items, write the file and return its summary."""
    import pathlib

    from jaxvlm.config import ConfigError
    from jaxvlm.data.pairs.examples import Item
    from jaxvlm.inference import embed_corpus, embedding_files, items
    from jaxvlm.inference.encoder import Encoder

    flags_only("embed", args)
    output = pathlib.Path(values.output)
    embedding_files.check(output)
    if blank := [text for text in values.text if not text.strip()]:
        raise ConfigError(f"--text={blank[0]}: the text is empty; give a text to embed")
    to_embed = [Item(text=text) for text in [*values.text, *_lines("texts", values.texts)]]
    root = pathlib.Path(values.images).parent
    images = [*values.image, *(str(root / line) for line in _lines("images", values.images))]
    to_embed += [Item(image=image) for image in images]
    ids = [""] * len(to_embed)
    ranges = embedding_files.read_ranges(values.ranges) if values.ranges else None
    if values.input:
        from_file, names = items.read(values.input, common.reading(values))
        to_embed, ids = to_embed + from_file, ids + names
    elif given := [n for n in common.READING if values[n].present]:
        raise ConfigError(f"--{given[0]} is for --input=FILE; add it, or leave --{given[0]} out")
    if not to_embed:
        raise ConfigError(
            "embed needs texts (--text, --texts), images (--image, --images) or both (--input)"
        )
    model = load_model("embed", values)
    settings = _settings(values, model)
    has_texts = any(item.words for item in to_embed) or not isinstance(model, Encoder)
    if values.instruction and not has_texts:
        raise ConfigError(
            "--instruction is read before a text, and all items are images; leave it out"
        )
    size = values.dims or model.width
    embed_corpus.check(len(to_embed), size, values.quantize, ranges)
    folder = output.with_name(output.name + ".parts")
    parts = embed_corpus.in_parts(model, to_embed, folder, settings, values.checkpoint)
    records = [
        {
            n: x
            for n, x in (("id", id), ("text", item.words and item.text), ("image", item.image))
            if x
        }
        for id, item in zip(ids, to_embed, strict=True)
    ]
    count, width = embed_corpus.write(parts, records, output, values.quantize, ranges)
    kind = values.quantize or "float32"
    say(f"{count} embeddings of {size} dims in {kind}: {output}")
    return {
        "texts": sum(not item.image for item in to_embed),
        "images": sum(bool(item.image) for item in to_embed),
        "dims": size,
        "columns": width,
        "kind": kind,
    }


def _settings(values: flags.FlagValues, model: Any) -> Any:
    """Choose how the items are embedded: as the model's input type says, or as the flags do."""
    from jaxvlm.inference import input_types
    from jaxvlm.inference.items import EmbedConfig

    flag, name = values["instruction"], values.input_type
    own = input_types.choose(model.input_types, name, flag.value if flag.present else None)
    given = EmbedConfig(values.batch_size, values.dims, part_size=values.part_size)
    if flag.present and (name or len(set(model.input_types.values())) == 1):
        was = input_types.choose(model.input_types, name).instruction
        if was != flag.value:
            say(f"--instruction={flag.value!r} replaces the model's {was!r}")
    return given.of_type(own)


def _lines(flag: str, name: str) -> list[str]:
    """Read the lines of a file and refuse empty ones; returns [] if no file is given."""
    import pathlib

    from jaxvlm.config import ConfigError

    if not name:
        return []
    try:
        lines = pathlib.Path(name).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--{flag}={name} can't be read: {error}") from None
    lines = lines[:-1] if not lines[-1] else lines
    lines = [line.removesuffix("\r") for line in lines]
    if blank := [i + 1 for i, line in enumerate(lines) if not line.strip()]:
        raise ConfigError(
            f"--{flag}={name}: line {blank[0]} is empty; embeddings are matched to lines, so "
            "remove it or fill it"
        )
    return lines
