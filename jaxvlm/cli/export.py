"""``jaxvlm export``."""

from __future__ import annotations

from typing import Any

from absl import flags

SUMMARY = (
    "Write a run's weights as a Hugging Face checkpoint, its adapters as a PEFT folder, or its "
    "vectors' model as a sentence-transformers folder."
)
USAGE = (
    "--workdir=DIR --output=FOLDER [--format=sentence_transformers] [--which=best|latest] "
    "[--merged] [--dtype=bfloat16]"
)


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``export``."""
    flags.DEFINE_string("workdir", "", "The run's folder.", flag_values=values)
    flags.DEFINE_string(
        "output", "", "A new folder for the checkpoint or the adapter.", flag_values=values
    )
    flags.DEFINE_enum(
        "format",
        "huggingface",
        ["huggingface", "sentence_transformers"],
        "What the folder is. sentence_transformers: of a run that trains vectors; "
        "SentenceTransformer(FOLDER) makes the same ones. Adapters are added to the weights.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "truncate_dim",
        0,
        "Of a sentence-transformers folder: dims of its vectors, a prefix that the run trained "
        "(Matryoshka); 0: all.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "which", "best", ["best", "latest"], "Which of the run's checkpoints.", flag_values=values
    )
    flags.DEFINE_string(
        "dtype",
        "",
        "float32, bfloat16 or float16; if not given, each tensor's own in the source, and float32 "
        "for adapters.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "merged",
        False,
        "Of a run with adapters: add them to the weights and write the whole checkpoint.",
        flag_values=values,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Export, and say what was written."""
    import pathlib

    from jaxvlm.build import adapters, pretrained, sentence_folder
    from jaxvlm.build.encoder import Encoder
    from jaxvlm.build.loaded import load
    from jaxvlm.cli.common import say
    from jaxvlm.config import ConfigError
    from jaxvlm.parallel import distributed

    if args:
        raise ConfigError(f"export takes flags only, not {args[0]!r}")
    if not values.workdir or not values.output:
        raise ConfigError("export needs --workdir=DIR and --output=FOLDER")
    distributed.initialize()
    workdir, output = (pathlib.Path(p).absolute() for p in (values.workdir, values.output))
    if pretrained.is_checkpoint(workdir):
        raise ConfigError(f"--workdir={workdir} is a Hugging Face checkpoint already")
    model = load(workdir, values.which)
    if values.format == "sentence_transformers":
        if values.merged:
            raise ConfigError(
                f"--merged is not read with {sentence_folder.FLAG}, which adds adapters always"
            )
        written = sentence_folder.export(model, workdir, output, values.dtype, values.truncate_dim)
    elif values.truncate_dim:
        raise ConfigError(f"--truncate_dim={values.truncate_dim} needs {sentence_folder.FLAG}")
    else:
        run_config = model.run if isinstance(model, Encoder) else model.config
        bounds = run_config.data.picture_pixels if run_config else (0, 0)
        how = (values.merged, values.dtype, bounds)
        written = adapters.export(workdir, output, model.params, model.model, *how)
    say(f"{written['tensors']} tensors, {written['bytes'] / 2**20:.1f} MiB: {output}")
    return written
