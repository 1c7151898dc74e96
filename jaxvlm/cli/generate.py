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

SUMMARY = "Answer a prompt about images or videos."
USAGE = '--checkpoint=WORKDIR --image=FILE [--image=FILE ...] --prompt="..."'
_FLAGS = {
    "image": "An image file; the flag can be repeated.",
    "video": "A video file, of which config.data.video of the run, or the checkpoint's video "
    "processor, says which frames are shown; the flag can be repeated.",
    "fps": "The number of frames of a video that are sampled in a second; 0 means the run's or the "
    "checkpoint's.",
    "num_frames": "The number of frames of a video that are sampled, whatever its length; 0 means "
    "the run's or the checkpoint's.",
    "prompt": "The prompt; <image> and <video> mark where each goes, and without marks the images "
    "come first, and then the videos.",
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
    frames = {"fps": 0.0, "num_frames": 0}
    define_flags(values, _FLAGS, image=(), video=(), max_new_tokens=64, **sampling, **frames)
    define_kv(values)
    define_cache(values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Generate the answer and print it as it is generated."""
    from jaxvlm.config import ConfigError
    from jaxvlm.inference.prompts import in_order

    flags_only("generate", args)
    if not values.prompt:
        raise ConfigError("generate needs --prompt=TEXT")
    kv = kv_settings(values)
    frames = {name: values[name].value for name in ("fps", "num_frames") if values[name].value}
    if frames and not values.video:
        raise ConfigError(f"--{next(iter(frames))} is for videos; give one with --video=FILE")
    model = load_model("generate", values)
    if frames:
        model.sample_videos(**frames)
    images, prompt = in_order(values.prompt, values.image, values.video)
    use_cache(values, model)
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    pieces, options = [], {name: values[name].value for name in names} | kv
    for piece in model.stream(images, prompt, **options):
        pieces.append(piece)
        say(piece, end="")
    say("")
    say_cached(model)
    if values.kv != "none":
        say(model.kv_memory.text())
    return {"answer": "".join(pieces).strip()} | inference_figures(model)
