"""The command ``jaxvlm plan``, which estimates memory and time before anything runs."""

from __future__ import annotations

import atexit
import contextlib
import gc
import itertools
from collections.abc import Iterator
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe, flags_only

SUMMARY = "Estimate memory and step time, and choose a strategy, before anything runs."
USAGE = (
    "--model=HF_FOLDER|NAME|RECIPE.py[:arg] --devices=h200:8 [--config.a.b=value ...] | "
    "--compare A.json B.json | --calibrate"
)
_FLAGS = {
    "model": "The model to plan: a Hugging Face folder (its config.json is read), a published "
    "model's name, or a recipe.",
    "devices": "The machine to plan for: h200:8, v5p:4x4x4, v5e:16, 2xv5e:16x16 (two slices) or "
    "cpu:8; any, with --prices, compares the prices of machines.",
    "train": "The parameters to train: full, lora (rank 16) or connector; by default those of "
    "the recipe, or all.",
    "objective": "The objective: sft (next-token prediction) or contrastive (pairs); by default "
    "that of the recipe, or the one that the model was made for.",
    "prices": 'The JSON file with the prices of devices per hour, such as {"h200": 3.5}, for '
    "--devices=any.",
    "html": "The file to write an HTML page with figures to; it works offline.",
    "save": "The file to write the plan's JSON object to, for --compare.",
    "batch": "The batch size over all devices, in packed sequences or pairs; 0 takes the "
    "recipe's, or one per device.",
    "seq": "The number of tokens in a packed sequence; 0 takes the recipe's, 2048, or a text "
    "encoder's maximum.",
    "images": "The number of images in a packed sequence; -1 takes the recipe's, or fills half "
    "of the tokens with images.",
    "patches": "The number of image patches in a packed sequence, for models with images of any "
    "size; 0 takes the recipe's, or fills half of the tokens with images.",
    "samples": "The number of packed sequences in an epoch, for its hours and price and for the "
    "comparison with cached visual tokens; 0 leaves these out.",
    "top": "The number of best candidates to print.",
    "price": "The price of a device per hour, for the price of an epoch; 0 means unknown.",
    "budget": "The maximum price per hour of all devices together, for --devices=any; 0 sets no "
    "limit.",
    "verify": "Compile the best candidate's real train step for the machine, and compare its "
    "memory with the plan.",
    "calibrate": "Measure the rates of this machine's devices (matmuls, memory, links), and save "
    "them for plans of their kind.",
    "compare": "Compare two plans that --save wrote.",
}

LOCAL = (
    "html",
    "save",
)
"""Flags that name what can't be in an object store."""


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``plan``."""
    recipe = _model_of(argv)
    is_recipe = recipe.partition(":")[0].endswith(".py")
    define_recipe(
        values,
        argv,
        "The recipe to plan, as with --model=RECIPE.py: its model, batch, length, loss, frozen "
        "parameters and adapters are used. Override its settings with --config.a.b=value.",
        recipe if is_recipe else None,
    )
    sizes = {"batch": 0, "seq": 0, "images": -1, "patches": 0, "samples": 0, "top": 5}
    modes = {"verify": False, "calibrate": False, "compare": False}
    define_flags(values, _FLAGS, price=0.0, budget=0.0, **sizes, **modes)


def _model_of(argv: list[str]) -> str:
    """Value of --model, before flags are parsed: a recipe adds flags of its own."""
    model = ""
    for arg, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if arg == "--":
            break
        name, is_given, value = arg.partition("=")
        if name in ("--model", "-model"):
            model = value if is_given else after
    return model


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Plan a run: search, print the report and write the requested files."""
    is_short = not (values.verify or values.calibrate or values.devices == "any")
    with _uncollected() if is_short else contextlib.nullcontext():
        return _run(values, args)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection, at exit too: it would take a third of a plan's time, and traces
    leave little garbage.
    """
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
    from jaxvlm.planner import command
    from jaxvlm.planner.request.request import RequestFlags

    if values.compare:
        if len(args) != 2:
            raise ConfigError("plan --compare takes two files: jaxvlm plan --compare A.json B.json")
        return command.compare(*args)
    flags_only("plan", args)
    if values.calibrate:
        rates = command.calibrate()
        if not values.model and values.config is None:
            return rates
    flag: Any = values["config"]
    recipe = from_config_dict(values.config) if values.config is not None else None
    if recipe and values.model not in ("", flag.config_filename):
        raise ConfigError(
            f"--model={values.model} and --config can't be combined: a recipe names its model, "
            "e.g. --model=configs/finetune.py:HF_FOLDER"
        )
    name = values.model or flag.config_filename if recipe else values.model
    if not name:
        raise ConfigError(
            "plan needs --model=HF_FOLDER, a published model's name, or a recipe: "
            "--model=configs/finetune.py:HF_FOLDER"
        )
    if not values.devices:
        raise ConfigError("plan needs --devices, e.g. --devices=h200:8, v5p:4x4x4 or cpu:8")
    request_flags = RequestFlags(
        values.batch, values.seq, values.images, values.patches, values.train, values.objective,
        values.samples, values.price,
    )  # fmt: skip
    plan_flags = command.PlanFlags(
        values.devices, values.top, values.verify, values.html, values.save, values.prices,
        values.budget,
    )  # fmt: skip
    return command.plan(name, recipe, request_flags, plan_flags)
