"""``jaxvlm eval``."""

from __future__ import annotations

from typing import Any

from absl import flags

SUMMARY = "Exact match of a trained model on a data file, and the blind control."
USAGE = "--checkpoint=WORKDIR [--data=FILE] [--limit=N] [--sheet=FILE.png]"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``eval``."""
    flags.DEFINE_string(
        "checkpoint",
        "",
        "A workdir of `jaxvlm train`; its best checkpoint is used.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "data", "", "Data file; the run's own config.data.eval if not given.", flag_values=values
    )
    flags.DEFINE_integer("limit", 0, "Records at most; 0 is all.", flag_values=values)
    flags.DEFINE_string(
        "sheet",
        "",
        "Write a contact sheet of pictures and answers to this PNG.",
        flag_values=values,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Evaluate and print the report."""
    from jaxvlm.build import load
    from jaxvlm.config import ConfigError
    from jaxvlm.parallel import distributed

    if args:
        raise ConfigError(f"eval takes flags only, not {args[0]!r}")
    if not values.checkpoint:
        raise ConfigError("eval needs --checkpoint=WORKDIR")
    distributed.initialize()
    model = load(values.checkpoint)
    report = model.evaluate(values.data, limit=values.limit, sheet=values.sheet)
    for line in report.lines():
        print(line)
    return report.metrics | {f"blind/{name}": value for name, value in report.blind.items()}
