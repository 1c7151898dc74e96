"""The command ``jaxvlm train``, which trains a model or resumes a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe, flags_only

SUMMARY = "Train a model, or resume the run in --workdir."
USAGE = "--config=FILE[:arg] --workdir=DIR [--config.a.b=value ...]"
_FLAGS = {
    "workdir": "The folder of the run, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER; an existing run "
    "in it is resumed.",
    "print_config": "Print the value of every setting, defaults included, and exit.",
    "xla_flags": "The groups of compiler flags to set before JAX starts, for this machine's "
    "platform: overlap, collective_matmul, whole_matmul, nccl (comma-separated). Flags already in "
    "XLA_FLAGS or LIBTPU_INIT_ARGS take precedence.",
    "print_xla_flags": "Print the flags of all groups by platform, and those that --xla_flags "
    "sets on this machine, and exit.",
    "dry_run": "Compile the step, print one decoded batch with its loss mask and the memory "
    "that the step needs, and exit; nothing is trained or saved.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``train``."""
    define_recipe(
        values,
        argv,
        "The recipe: a Python file with get_config(arg) that returns a jaxvlm.Config or a "
        "ConfigDict with the same keys. Override any setting with --config.a.b=value; "
        "--print_config prints all settings, and docs/settings.md explains each.",
    )
    shown = {"print_config": False, "print_xla_flags": False, "dry_run": False}
    define_flags(values, _FLAGS, xla_flags=[], **shown)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Train, and report the last evaluation."""
    from jaxvlm.config import Config, ConfigError, from_config_dict, to_config_dict

    flags_only("train", args)
    if values.xla_flags or values.print_xla_flags:
        from jaxvlm.parallel import xla_flags

        changed = xla_flags.apply(values.xla_flags)
        if values.print_xla_flags:
            here = [f"here ({xla_flags.platform()}): {k}={v}" for k, v in changed.items()]
            print("\n".join(xla_flags.table() + (here or ["here: nothing is set"])))
            return changed
        for name, value in changed.items():
            print(f"set by --xla_flags={','.join(values.xla_flags)}: {name}={value}", flush=True)
    if values.config is None:
        raise ConfigError(
            "train needs a recipe: --config=FILE, e.g. --config=configs/quickstart.py"
        )
    flag: Any = values["config"]
    config: Config = from_config_dict(values.config)
    if values.print_config:
        print("\n".join(_lines(config)))
        return to_config_dict(config).to_dict()
    from jaxvlm.parallel.distributed import processes
    from jaxvlm.trainer.trainer import Trainer

    if not values.workdir and not values.dry_run:
        raise ConfigError("train needs a folder for the run: --workdir=DIR")
    processes.catch_sigusr2()  # it may come before the run is set up
    processes.initialize()
    made = Trainer(config, values.workdir)
    made.began = processes.began()
    _check_overrides(flag.override_values, made.config, made.auto)
    if values.dry_run:
        return made.dry_run()
    result = made.fit()
    if result.get("ended") == "preempted":  # as launched jobs ask, to be started again
        result["exit_code"] = int(os.environ.get("JAXVLM_STOPPED_STATUS", "0"))
    return result


_SETTLED = {"model": "the checkpoint", "strategy": "config.strategy.name"}
"""Group of settings -> what may settle them otherwise."""


def _check_overrides(overrides: dict[str, Any], config: Any, autos: list[str]) -> None:
    """Refuse what was asked of the model on the command line where a checkpoint says otherwise.

    A recipe's value that is the default can't be told from one that is not given, but these can.
    """
    from jaxvlm.config import ConfigError

    for path, asked in overrides.items():
        group = path.split(".")[0]
        if group not in _SETTLED or path.endswith(".vocab_size"):  # 0: the tokenizer's
            continue
        if path in autos or path.startswith("model.family."):  # the planner's; a path made absolute
            continue
        used = config
        for name in path.split("[")[0].split("."):
            used = getattr(used, name)
        if "[" in path:
            continue  # a part of a list
        if used != (tuple(asked) if isinstance(used, tuple) else asked):
            raise ConfigError(
                f"--config.{path}={asked!r}, but {_SETTLED[group]} says {used!r}; leave it out"
            )


def _lines(config: Any, path: str = "config") -> Iterator[str]:
    """``config.a.b=value`` for every setting, as the command line takes it."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{path}.{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _lines(value, name)
        else:
            yield f"{name}={value!r}"
