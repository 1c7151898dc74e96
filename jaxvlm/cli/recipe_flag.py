"""The flag ``--config=FILE[:arg]``: a recipe's settings and their overrides."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags


class RecipeParser(flags.ArgumentParser):
    """Loads a recipe as a locked ConfigDict, also where its get_config returns a dataclass.

    Args:
        loader: parser of ml_collections, which calls get_config.
        argv: arguments of the command, in which overrides are looked for.
    """

    def __init__(self, loader: flags.ArgumentParser, argv: list[str]):
        super().__init__()
        self.loader, self.argv = loader, argv

    def parse(self, argument: str) -> Any:
        """Call get_config of the file ``argument``; text after a colon is its own argument."""
        from jaxvlm.config import to_config_dict

        config = self.loader.parse(argument)
        config = to_config_dict(config) if dataclasses.is_dataclass(config) else config
        for given in self.argv:
            if override := re.match(r"--?(?:no)?config\.([\w.]+)", given):
                _add_groups(config, override[1].split("."))
        return config

    def flag_type(self) -> str:
        """Type in the help of the flag."""
        return self.loader.flag_type()


def _add_groups(config: Any, path: list[str]) -> None:
    """Add the groups of an extension's options that an override sets a field of."""
    from jaxvlm.config import ConfigError

    for depth, name in enumerate(path):
        if not isinstance(config, ml_collections.ConfigDict):
            if "options" not in path[:depth]:
                return
            raise ConfigError(
                f"config.{'.'.join(path[:depth])} is {config!r}, and no group of settings, which "
                f"config.{'.'.join(path)} would be in"
            )
        if depth == len(path) - 1:
            return
        if name not in config:
            if config.is_locked or "options" not in path[:depth]:
                return
            config[name] = ml_collections.ConfigDict()
        config = config[name]


def define_recipe(
    values: flags.FlagValues, argv: list[str], help_text: str, default: str | None = None
) -> None:
    """Declare ``--config`` and its overrides ``--config.a.b=value``.

    Unknown settings are refused by the recipe's ConfigDict, which is locked except for the options
    of extensions: of these, keys that the recipe does not have may be set too.

    Args:
        values: flags of the command.
        argv: arguments of the command, in which overrides are looked for.
        help_text: help of the flag.
        default: recipe that is used where the flag is not given.
    """
    config_flags.DEFINE_config_file(
        "config",
        None,
        help_text,
        flag_values=values,
        lock_config=False,
        accept_new_attributes=True,
        sys_argv=["jaxvlm", *argv],
    )
    values["config"].parser = RecipeParser(values["config"].parser, argv)
    if default is not None:
        values.set_default("config", default)
