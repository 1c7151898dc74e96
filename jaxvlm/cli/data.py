"""``jaxvlm data check``."""

from __future__ import annotations

from typing import Any

from absl import flags

SUMMARY = "data check FILE: say what training would refuse, by reason."
USAGE = "check FILE [--max_length=N] [--image_size=N]"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``data``."""
    flags.DEFINE_string(
        "tokenizer",
        "",
        "Folder of a tokenizer; else a word tokenizer is built from the file.",
        flag_values=values,
    )
    flags.DEFINE_integer("max_length", 512, "Tokens a row.", flag_values=values)
    flags.DEFINE_integer("image_size", 64, "Pixels a side.", flag_values=values)
    flags.DEFINE_integer("patch_size", 16, "Pixels a side of a patch.", flag_values=values)
    flags.DEFINE_integer("max_images", 8, "Pictures a row.", flag_values=values)
    flags.DEFINE_string("image_root", "", "Folder of the pictures.", flag_values=values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Check, print, and exit 1 where records would be refused."""
    from jaxvlm.config import ConfigError, DataConfig
    from jaxvlm.data import check, tokenizer

    if len(args) != 2 or args[0] != "check":
        raise ConfigError("usage: jaxvlm data check FILE")
    config = DataConfig(
        max_length=values.max_length,
        max_images=values.max_images,
        image_root=values.image_root,
    )
    size, patch = values.image_size, values.patch_size
    folder = values.tokenizer
    report = check.check(
        args[1],
        config,
        chat_tokenizer=tokenizer.load(folder) if folder else None,
        image_size=size,
        num_patches=(size // patch) ** 2,
    )
    for line in report.lines():
        print(line)
    return report.to_dict() | {"exit_code": 1 if report.problems else 0}
