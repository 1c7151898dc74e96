"""The command ``jaxvlm generate``, which answers a prompt about images."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_model, load_model, say

SUMMARY = "Answer a prompt about images."
USAGE = '--checkpoint=WORKDIR --image=FILE [--image=FILE ...] --prompt="..."'


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``generate``."""
    define_model(values)
    flags.DEFINE_multi_string(
        "image", [], "An image file; the flag can be repeated.", flag_values=values
    )
    flags.DEFINE_string(
        "prompt",
        "",
        "The prompt; <image> marks where each image goes, and without marks the images come first.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_new_tokens", 64, "The maximum number of tokens to generate.", flag_values=values
    )
    flags.DEFINE_float(
        "temperature",
        0.0,
        "The sampling temperature; 0 always takes the most likely token (greedy decoding).",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "top_k",
        0,
        "Sample among this many most likely tokens; 0 means all tokens.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "top_p",
        1.0,
        "Sample among the most likely tokens whose total probability reaches this value (nucleus "
        "sampling).",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed", 0, "The seed of sampling, used at temperatures above 0.", flag_values=values
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Generate the answer and print it as it is generated."""
    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"generate takes flags only, not {args[0]!r}")
    if not values.prompt:
        raise ConfigError("generate needs --prompt=TEXT")
    model = load_model("generate", values)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    pieces = []
    for piece in model.stream(values.image, values.prompt, **{n: values[n].value for n in names}):
        pieces.append(piece)
        say(piece, end="")
    say("")
    return {"answer": "".join(pieces).strip()}
