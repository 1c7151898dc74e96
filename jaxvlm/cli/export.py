"""``jaxvlm export``."""

from __future__ import annotations

from typing import Any

from absl import flags

SUMMARY = "Write a run's weights as a Hugging Face checkpoint, or its adapters as a PEFT folder."
USAGE = "--workdir=DIR --output=FOLDER [--which=best|latest] [--merged] [--dtype=bfloat16]"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``export``."""
    flags.DEFINE_string("workdir", "", "The run's folder.", flag_values=values)
    flags.DEFINE_string(
        "output", "", "A new folder for the checkpoint or the adapter.", flag_values=values
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

    from jaxvlm.build import adapters, load, pretrained
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
    written = adapters.export(
        workdir, output, model.params, model.model, values.merged, values.dtype
    )
    say(f"{written['tensors']} tensors, {written['bytes'] / 2**20:.1f} MiB: {output}")
    return written
