"""The command ``jaxvlm generate``, which answers a prompt about images."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import (
    define_cache,
    define_flags,
    define_kv,
    define_model,
    flags_only,
    inference_figures,
    kv_settings,
    load_model,
    say,
    say_cached,
    use_cache,
)

SUMMARY = "Answer a prompt about images."
USAGE = '--checkpoint=WORKDIR --image=FILE [--image=FILE ...] --prompt="..."'
_FLAGS = {
    "image": "An image file; the flag can be repeated.",
    "prompt": "The prompt; <image> marks where each image goes, and without marks the images come "
    "first.",
    "max_new_tokens": "The maximum number of tokens to generate.",
    "temperature": "The sampling temperature; 0 always takes the most likely token (greedy "
    "decoding).",
    "top_k": "Sample among this many most likely tokens; 0 means all tokens.",
    "top_p": "Sample among the most likely tokens whose total probability reaches this value "
    "(nucleus sampling).",
    "seed": "The seed of sampling, used at temperatures above 0, and of the places that "
    "--kv=random keeps.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``generate``."""
    define_model(values)
    sampling = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}
    define_flags(values, _FLAGS, image=(), max_new_tokens=64, **sampling)
    define_kv(values)
    define_cache(values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Generate the answer and print it as it is generated."""
    from jaxvlm.config import ConfigError

    flags_only("generate", args)
    if not values.prompt:
        raise ConfigError("generate needs --prompt=TEXT")
    kv = kv_settings(values)
    model = load_model("generate", values)
    use_cache(values, model)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    pieces, options = [], {name: values[name].value for name in names} | kv
    for piece in model.stream(values.image, values.prompt, **options):
        pieces.append(piece)
        say(piece, end="")
    say("")
    say_cached(model)
    if values.kv != "none":
        say(model.kv_memory.text())
    return {"answer": "".join(pieces).strip()} | inference_figures(model)
