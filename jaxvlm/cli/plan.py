"""``jaxvlm plan``."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

from absl import flags
from ml_collections import config_flags

SUMMARY = "Say which strategy, on which chips, fits and how fast, before anything runs."
USAGE = (
    "--model=HF_FOLDER|NAME|RECIPE.py[:arg] --devices=h200:8 [--config.a.b=value ...] | "
    "--compare A.json B.json | --calibrate"
)


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``plan``."""
    recipe = _model_of(argv)
    is_recipe = recipe.partition(":")[0].endswith(".py")
    config_flags.DEFINE_config_file(
        "config",
        recipe if is_recipe else None,
        "As --model, of a recipe: its model, batch, length, loss, frozen parts and adapters. "
        "Override any with --config.a.b=value.",
        flag_values=values,
        sys_argv=["jaxvlm", *argv],  # where overrides are looked for
    )
    text = {
        "model": "A Hugging Face folder (config.json is read), a published model's name, or a "
        "recipe.",
        "devices": "Machine: h200:8, v5p:4x4x4, v5e:16, 2xv5e:16x16 (slices), cpu:8; or any, with "
        "--prices: where to run.",
        "train": "full, lora (rank 16) or connector; if not given, all, or the recipe's.",
        "objective": "sft (next tokens) or contrastive (pairs); if not given, the recipe's, or "
        "what the model is for.",
        "prices": 'FILE.json {"h200": price of a device for an hour, ...}, with --devices=any.',
        "html": "Write a page with figures to this file; it opens offline.",
        "save": "Write the plan's JSON object to this file, for --compare.",
    }
    for name, what in text.items():
        flags.DEFINE_string(name, "", what, flag_values=values)
    numbers = {
        "batch": (
            0,
            "Rows (pairs) of a step over all devices; 0: one a device, or the recipe's.",
        ),
        "seq": (0, "Tokens of a row; 0: 2048, the most of a text encoder, or the recipe's."),
        "images": (-1, "Pictures of a row; -1: half of its tokens are theirs, or the recipe's."),
        "patches": (0, "Patches of a row, where pictures come in any size; 0: likewise."),
        "samples": (
            0,
            "Rows of an epoch, for its hours, its price and what keeping visual tokens is; "
            "0: not known, and nothing is said of these.",
        ),
        "top": (5, "Ways to print."),
    }
    for name, (default, what) in numbers.items():
        flags.DEFINE_integer(name, default, what, flag_values=values)
    flags.DEFINE_float("price", 0.0, "Of a device for an hour; 0: not known.", flag_values=values)
    flags.DEFINE_float(
        "budget", 0.0, "Most that an hour may cost, with --devices=any.", flag_values=values
    )
    flags.DEFINE_bool(
        "verify", False, "Compile the best way's real step for the machine.", flag_values=values
    )
    flags.DEFINE_bool(
        "calibrate",
        False,
        "Measure what this machine's devices reach (matmuls, memory, links), and keep it for plans "
        "of their kind.",
        flag_values=values,
    )
    flags.DEFINE_bool("compare", False, "Set two saved plans side by side.", flag_values=values)


def _model_of(argv: list[str]) -> str:
    """What --model says, before flags are read: a recipe brings flags of its own."""
    found = ""
    for arg, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if arg == "--":
            break
        name, is_given, value = arg.partition("=")
        if name in ("--model", "-model"):
            found = value if is_given else after
    return found


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Plan, print, write."""
    is_short = not (values.verify or values.calibrate or values.devices == "any")
    with _uncollected() if is_short else contextlib.nullcontext():
        return _run(values, args)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No cycles are looked for, at exit neither: it would be a third of a plan's time, and what
    traces leave behind is little."""
    was = gc.isenabled()
    gc.disable()
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        if was:
            gc.enable()


def _run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    from jaxvlm.config import ConfigError, from_config_dict
    from jaxvlm.plan import command
    from jaxvlm.plan.question import Asked

    if values.compare:
        if len(args) != 2:
            raise ConfigError("plan --compare takes two files: jaxvlm plan --compare A.json B.json")
        return command.compare(*args)
    if args:
        raise ConfigError(f"plan takes flags only, not {args[0]!r}")
    if values.calibrate:
        rates = command.calibrate()
        if not values.model and values.config is None:
            return rates
    recipe = from_config_dict(values.config) if values.config is not None else None
    if recipe and values.model not in ("", values["config"].config_filename):
        raise ConfigError(
            f"--model={values.model} and --config: give one; a recipe names its model, e.g. "
            "--model=configs/finetune.py:HF_FOLDER"
        )
    name = values.model or values["config"].config_filename if recipe else values.model
    if not name:
        raise ConfigError(
            "plan needs --model=HF_FOLDER, a published model's name, or a recipe: "
            "--model=configs/finetune.py:HF_FOLDER"
        )
    if not values.devices:
        raise ConfigError("plan needs --devices, e.g. --devices=h200:8, v5p:4x4x4 or cpu:8")
    asked = Asked(
        values.batch, values.seq, values.images, values.patches, values.train, values.objective,
        values.samples, values.price,
    )  # fmt: skip
    wanted = command.Wanted(
        values.devices, values.top, values.verify, values.html, values.save, values.prices,
        values.budget,
    )  # fmt: skip
    return command.plan(name, recipe, asked, wanted)
