"""The command ``jaxvlm export``, which writes a run's model in a format of Hugging Face."""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, flags_only, say

SUMMARY = (
    "Write a run's weights as a Hugging Face checkpoint, its adapters as a PEFT folder, or its "
    "embedding model as a sentence-transformers folder."
)
USAGE = (
    "--workdir=DIR --output=FOLDER [--format=sentence_transformers] [--which=best|latest] "
    "[--merged] [--dtype=bfloat16]"
)
_FLAGS = {
    "workdir": "The folder of the run to export; it may be in an object store.",
    "output": "The new folder to write the checkpoint or the adapter to; gs://BUCKET/FOLDER or "
    "s3://BUCKET/FOLDER is one in an object store.",
    "truncate_dim": "The number of dims to which a sentence-transformers folder truncates its "
    "embeddings, one of the prefixes that the run trained (Matryoshka); 0 keeps all dims.",
    "max_seq_length": "The number of tokens to which a sentence-transformers folder of a text "
    "encoder truncates texts; by default that of the run, if it is the same for queries and "
    "documents.",
    "dtype": "The dtype of the written tensors: float32, bfloat16 or float16. By default each "
    "tensor keeps the dtype that it has in the source, and adapters are written as float32.",
    "merged": "Merge the run's adapters into the weights and write a complete checkpoint.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``export``."""
    define_flags(values, _FLAGS, truncate_dim=0, max_seq_length=0, merged=False)
    flags.DEFINE_enum(
        "format",
        "huggingface",
        ["huggingface", "sentence_transformers"],
        "The format of the folder. sentence_transformers is for runs that train embeddings: "
        "SentenceTransformer(FOLDER) computes the same embeddings, and adapters are merged into "
        "the weights.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "which",
        "best",
        ["best", "latest"],
        "The checkpoint of the run to export.",
        flag_values=values,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Export the run and return a summary of what was written."""
    from jaxvlm.checkpoint import run_folder
    from jaxvlm.config import ConfigError
    from jaxvlm.hf import pretrained
    from jaxvlm.parallel.distributed import processes

    flags_only("export", args)
    if not values.workdir or not values.output:
        raise ConfigError("export needs --workdir=DIR and --output=FOLDER")
    processes.initialize()
    workdir = run_folder.local_to_read(values.workdir, "--workdir").absolute()
    if pretrained.is_checkpoint(workdir):
        raise ConfigError(
            f"--workdir={workdir} is already a Hugging Face checkpoint; give a run's folder"
        )
    with run_folder.sent(values.output, "--output") as output:
        written = _write(values, workdir, output)
    say(f"{written['tensors']} tensors, {written['bytes'] / 2**20:.1f} MiB: {values.output}")
    return written


def _write(values: flags.FlagValues, workdir: pathlib.Path, output: pathlib.Path) -> dict[str, Any]:
    """Write the run's model to a local folder; the number of ``tensors`` and ``bytes``."""
    from jaxvlm.config import ConfigError, DataConfig
    from jaxvlm.hf import peft_folder, pretrained
    from jaxvlm.inference import input_types, sentence_transformers
    from jaxvlm.inference.encoder import Encoder
    from jaxvlm.inference.load import load

    model = load(workdir, values.which)
    if values.format == "sentence_transformers":
        if values.merged:
            raise ConfigError(
                f"--merged does not go with {sentence_transformers.FLAG}, which always merges "
                "adapters"
            )
        return sentence_transformers.export(
            model, workdir, output, values.dtype, values.truncate_dim, values.max_seq_length
        )
    if given := [n for n in ("truncate_dim", "max_seq_length") if values[n].value]:
        name = given[0]
        raise ConfigError(f"--{name}={values[name].value} needs {sentence_transformers.FLAG}")
    run_config = model.run if isinstance(model, Encoder) else model.config
    if run_config and run_config.data.resize != "auto":
        say(
            f"the run resized images by config.data.resize={run_config.data.resize!r}; the "
            "folder's image processor does not, so give it images that are square already"
        )
    if run_config and (values.merged or not model.model.adapted):
        style = model.tokenizer.style if isinstance(model, Encoder) and model.tokenizer else None
        length = style.max_length if style else 0
        input_types.check_same_as_folder(workdir / pretrained.SAVED, run_config, length)
    data = run_config.data if run_config else DataConfig()
    how = (values.merged, values.dtype, data)
    return peft_folder.export(workdir, output, model.params, model.model, *how)
