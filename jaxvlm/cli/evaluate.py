"""``jaxvlm eval``."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_model, load_model, say

SUMMARY = "Exact match of a trained model on a data file, and the blind control."
USAGE = "--checkpoint=WORKDIR [--data=FILE] [--limit=N] [--sheet=FILE.png] [--mesh=fsdp=4,tensor=2]"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``eval``."""
    define_model(values)
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
    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"eval takes flags only, not {args[0]!r}")
    model = load_model("eval", values)
    report = model.evaluate(values.data, limit=values.limit, sheet=values.sheet)
    for line in report.lines():
        say(line)
    return report.metrics | {f"blind/{name}": value for name, value in report.blind.items()}
