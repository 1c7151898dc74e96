"""``jaxvlm data``."""

from __future__ import annotations

from typing import Any

from absl import flags
from ml_collections import config_flags

SUMMARY = "data check FILE: say what training would refuse, by reason."
USAGE = "check FILE [--config=RECIPE[:arg] | --max_length=N --image_size=N ...]"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``data``."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "The recipe that FILE is for: its limits, picture size and tokenizer are used, and the "
        "other flags here are not. Overrides as in `jaxvlm train`.",
        flag_values=values,
        sys_argv=["jaxvlm", *argv],  # where overrides are looked for
    )
    flags.DEFINE_string(
        "tokenizer",
        "",
        "Folder of a tokenizer; else a word tokenizer is built from the file.",
        flag_values=values,
    )
    flags.DEFINE_integer("max_length", 512, "Tokens a row.", flag_values=values)
    flags.DEFINE_integer("image_size", 64, "Pixels a side.", flag_values=values)
    flags.DEFINE_integer("patch_size", 16, "Pixels a side of a patch.", flag_values=values)
    flags.DEFINE_integer("max_images", 8, "Pictures (or tiles of them) a row.", flag_values=values)
    flags.DEFINE_string(
        "image_root", "", "Folder of the pictures; else the data file's.", flag_values=values
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Check, print, and exit 1 where records would be refused."""
    from jaxvlm.config import ConfigError

    if len(args) != 2 or args[0] != "check":
        raise ConfigError("usage: jaxvlm data check FILE [--config=RECIPE]")
    report = _checked(values, args[1])
    for line in report.lines():
        print(line)
    return report.to_dict() | {"exit_code": 1 if report.problems else 0}


def _checked(values: flags.FlagValues, spec: str) -> Any:
    """The report on a file, of pairs where the recipe trains vectors."""
    from jaxvlm.build import pair_run
    from jaxvlm.build.losses import of_vectors
    from jaxvlm.config import TrainConfig, from_config_dict
    from jaxvlm.data import check

    if values.config is None:
        return check.check(spec, **_of_flags(values))
    config: TrainConfig = from_config_dict(values.config)
    if of_vectors(config):
        return pair_run.check(config, spec)
    return check.check(spec, **_of_recipe(config, spec))


def _of_flags(values: flags.FlagValues) -> dict[str, Any]:
    """What ``check`` needs to know, flag by flag."""
    from jaxvlm.config import DataConfig
    from jaxvlm.data import images, tokenizer

    return {
        "config": DataConfig(
            max_length=values.max_length,
            max_images=values.max_images,
            image_root=values.image_root,
        ),
        "chat_tokenizer": tokenizer.load(values.tokenizer) if values.tokenizer else None,
        "prepare": images.squares(values.image_size),
        "num_patches": (values.image_size // values.patch_size) ** 2,
    }


def _of_recipe(config: Any, spec: str) -> dict[str, Any]:
    """The same, as a run of the recipe on ``spec`` would have it."""
    from jaxvlm.build import pretrained
    from jaxvlm.build.words import make_tokenizer
    from jaxvlm.data import chat
    from jaxvlm.data.run_data import read_records

    source = pretrained.find(config.model.checkpoint)
    config = pretrained.with_source(config, source)
    read = read_records(config.data, spec)
    chat_tokenizer = make_tokenizer(config, None, lambda: chat.texts(read[0]), source)
    pictures = pretrained.pictures(config, source, chat_tokenizer)
    return {
        "config": config.data,
        "chat_tokenizer": chat_tokenizer,
        "prepare": pictures.prepare,
        "patching": pictures.patching,
        "num_patches": pictures.of_file,
    }
