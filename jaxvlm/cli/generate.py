"""``jaxvlm generate``."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_model, load_model, say

SUMMARY = "Answer a prompt about pictures."
USAGE = '--checkpoint=WORKDIR --image=FILE [--image=FILE ...] --prompt="..."'


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``generate``."""
    define_model(values)
    flags.DEFINE_multi_string("image", [], "A picture file", flag_values=values)
    flags.DEFINE_string(
        "prompt",
        "",
        "What to ask. <image> marks where each picture goes; without a mark they come first.",
        flag_values=values,
    )
    flags.DEFINE_integer("max_new", 64, "New tokens at most.", flag_values=values)
    flags.DEFINE_float(
        "temperature", 0.0, "0 takes the likeliest token (greedy).", flag_values=values
    )
    flags.DEFINE_integer(
        "top_k", 0, "Draw among the so many likeliest tokens; 0 is all.", flag_values=values
    )
    flags.DEFINE_float(
        "top_p", 1.0, "Draw among the likeliest that reach this probability.", flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "Of the draws, for temperatures above 0.", flag_values=values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Generate and print the answer."""
    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"generate takes flags only, not {args[0]!r}")
    if not values.prompt:
        raise ConfigError("generate needs --prompt=TEXT")
    model = load_model("generate", values)
    names = ("max_new", "temperature", "top_k", "top_p", "seed")
    pieces = []
    for piece in model.stream(values.image, values.prompt, **{n: values[n].value for n in names}):
        pieces.append(piece)
        say(piece, end="")
    say("")
    return {"answer": "".join(pieces).strip()}
