"""The command ``jaxvlm data``, which checks a data file before training, or packs it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe

SUMMARY = "Check a data file: list the records that training would refuse, by reason; or pack it."
USAGE = (
    "check [FILE] [--config=RECIPE[:arg] | --max_length=N --image_size=N ...]\n"
    "       jaxvlm data pack [FILE] --config=RECIPE[:arg] --output=FOLDER\n"
    "       jaxvlm data verify FOLDER"
)
_FLAGS = {
    "tokenizer": "The folder of the tokenizer; by default a word tokenizer is built from the file.",
    "max_length": "The maximum number of tokens in a packed sequence.",
    "image_size": "The height and width of images, in pixels.",
    "patch_size": "The height and width of a patch, in pixels.",
    "max_images": "The maximum number of images, or of tiles of images, in a packed sequence.",
    "image_root": "The folder that image names are relative to; by default the data file's folder.",
    "look_alikes": "Also list images of one colour, and those that look like an earlier one: whose "
    "perceptual hashes differ in at most so many of 64 bits (0 to 16; 4 finds other sizes and "
    "qualities of one image). For conversations; needs pip install 'jaxvlm[check]'. The default -1 "
    "looks for none.",
    "output": "For `pack`: the folder, or the gs:// or s3:// URL, that the set is written to; "
    "config.data.train then names it.",
    "shard_mb": "For `pack`: the size of a tar file of images, about, in MiB.",
    "plot": "A PNG file to draw tokens, images and sizes to; needs pip install 'jaxvlm[check]'.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``data``."""
    define_recipe(
        values,
        argv,
        "The recipe that FILE is meant for; without FILE, the sources of its mixture are checked. "
        "It determines the limits, the image size and the tokenizer; the other flags of this "
        "command are then ignored. Override its settings with --config.a.b=value.",
    )
    define_flags(
        values,
        _FLAGS,
        max_length=512,
        image_size=64,
        patch_size=16,
        max_images=8,
        look_alikes=-1,
        shard_mb=256,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Check the file, print the report, and exit 1 if records would be refused."""
    from jaxvlm.config import ConfigError

    if args == ["check"] and values.config is not None and values.config.data.mixture:
        return _mixture(values)
    if args[:1] == ["pack"] and len(args) <= 2:
        return _pack(values, *args[1:])
    if len(args) == 2 and args[0] == "verify":
        return _verify(args[1])
    if len(args) != 2 or args[0] != "check":
        raise ConfigError(
            "usage: jaxvlm data check FILE [--config=RECIPE] (without FILE the recipe has a "
            "mixture), data pack [FILE] --config=RECIPE --output=FOLDER, or data verify FOLDER"
        )
    _check_flags(values)
    report = _checked(values, args[1])
    for line in report.lines():
        print(line)
    _draw(values, [report])
    return report.to_dict() | {"exit_code": 1 if report.problems else 0}


def _check_flags(values: flags.FlagValues) -> None:
    from jaxvlm.config import ConfigError
    from jaxvlm.data.images.look_alikes import MAX_DISTANCE

    if not -1 <= values.look_alikes <= MAX_DISTANCE:
        raise ConfigError(f"--look_alikes={values.look_alikes}: must be from 0 to {MAX_DISTANCE}")
    if values.plot and not values.plot.lower().endswith(".png"):
        raise ConfigError(f"--plot={values.plot}: the name of the file must end in .png")


def _draw(values: flags.FlagValues, reports: list[Any]) -> None:
    if values.plot:
        from jaxvlm.data import check_plot

        check_plot.draw(reports, values.plot)
        print(f"plot: {values.plot}")


def _checked(values: flags.FlagValues, spec: str) -> Any:
    """Validate a file: as pairs if the recipe trains embeddings, else as conversations."""
    from jaxvlm.config import Config, ConfigError, formats_of, from_config_dict, refuse_unread_by
    from jaxvlm.data import validate
    from jaxvlm.data.conversations.content import read_records
    from jaxvlm.data.conversations.mixture_records import of_source
    from jaxvlm.losses.registry import trains_embeddings
    from jaxvlm.trainer import embedding_run

    if values.config is None:
        settings = _of_flags(values)
        refuse_unread_by(settings["config"], formats_of(settings["config"], spec))
        return validate.validate(spec, look_alikes=values.look_alikes, **settings)
    config: Config = from_config_dict(values.config)
    names, whole = (spec, config.data.train, config.data.eval), os.path.abspath(spec)
    refuse_unread_by(config.data, formats_of(config.data, *names))
    if trains_embeddings(config):
        if values.look_alikes >= 0 or values.plot:
            raise ConfigError("--look_alikes and --plot are for conversations, not for pairs")
        return embedding_run.validate_file(config, spec)
    same = (x for x in config.data.mixture.values() if os.path.abspath(x.train) == whole)
    source = next(same, None)
    data = of_source(config.data, source) if source else config.data
    config = dataclasses.replace(config, data=dataclasses.replace(data, mixture={}))
    read = read_records(config.data, spec)
    how = _of_recipe(config, read) | {"look_alikes": values.look_alikes, "given": read}
    return validate.validate(spec, **how)


def _mixture(values: flags.FlagValues) -> dict[str, Any]:
    """Check each source of a recipe's mixture."""
    from jaxvlm.config import from_config_dict
    from jaxvlm.data import validate
    from jaxvlm.data.conversations.content import read_records
    from jaxvlm.trainer.checks import check_data

    config = from_config_dict(values.config)
    check_data(config)
    _check_flags(values)
    read = read_records(config.data, "")
    how = _of_recipe(config, read) | {"look_alikes": values.look_alikes}
    mask = config.model.decoder.visual_mask
    reports, shares, can_run = validate.validate_mixture(
        how.pop("config"), config.seed, mask, read, **how
    )
    for line in (*(line for report in reports for line in report.lines()), *shares):
        print(line)
    _draw(values, reports)
    found = {name: x.to_dict() for name, x in zip(config.data.mixture, reports, strict=True)}
    failed = any(report.problems for report in reports) or not can_run
    return {"sources": found, "shares": shares, "exit_code": 1 if failed else 0}


def _pack(values: flags.FlagValues, spec: str = "") -> dict[str, Any]:
    """Pack the training data of a recipe, or a file as if the recipe named it."""
    from jaxvlm.config import ConfigError, from_config_dict
    from jaxvlm.data.conversations import packed_files, packed_set
    from jaxvlm.data.conversations.content import is_remote
    from jaxvlm.stores.object_store import check_scheme
    from jaxvlm.trainer import checks, inputs

    for name in ("config", "output"):
        if not getattr(values, name):
            raise ConfigError(
                f"data pack needs --{name}: jaxvlm data pack [FILE] --config=RECIPE[:arg] "
                "--output=FOLDER"
            )
    if is_remote(values.output):
        check_scheme("--output", values.output)
    if values.shard_mb < 1:
        raise ConfigError(f"--shard_mb={values.shard_mb}: must be at least 1")
    config = from_config_dict(values.config)
    if spec:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=spec))
    checks.check_packable(config)
    with packed_files.new_folder(values.output) as folder:
        prepared = inputs.prepare_conversations(config, None)
        dataset, size = prepared.dataset, values.shard_mb * 2**20
        reasons: dict[str, list[str]] = {}
        for problem in dataset.problems:
            reasons.setdefault(problem.reason, []).append(problem.id)
        for reason, ids in reasons.items():
            more = ", ..." if len(ids) > 3 else ""
            print(f"left out: {len(ids):,}  {reason}: {', '.join(ids[:3])}{more}")
        made = packed_set.made_for(
            dataset.config, dataset.settings, prepared.tokenizer, dataset.facts.has_videos
        )
        index = packed_set.write(
            folder, dataset.content, made, prepared.tokenizer, dataset.config, size
        )
    report: dict[str, Any] = {
        name: index[name] for name in ("records", "images", "sequences", "tokens")
    }
    report["left_out"] = len(dataset.problems)
    report["problems"] = reasons
    report["bytes"] = sum(size for size, _ in index["files"].values())
    print(
        f"{values.output}: {report['records']:,} records, {report['images']:,} images, "
        f"{report['sequences']:,} packed sequences, {report['bytes'] / 2**20:,.1f} MiB; "
        f"{report['left_out']:,} records are left out"
    )
    return report


def _verify(folder: str) -> dict[str, Any]:
    """Read all of a packed set, and exit 1 if a file is not as it was packed."""
    from jaxvlm.config import ConfigError, DataConfig
    from jaxvlm.data.conversations import packed_files
    from jaxvlm.data.conversations.content import is_packed

    if not is_packed(folder, DataConfig()):
        what = "is no packed set" if os.path.exists(folder) else "does not exist"
        raise ConfigError(f"{folder} {what}; `jaxvlm data pack` makes a folder with a packed.json")
    found = dict(packed_files.damaged(folder))
    for name, what in found.items():
        print(f"{folder}/{name}: {what}")
    count = len(packed_files.read_index(folder)["files"])
    print(f"{folder}: {count - len(found)} of {count} files are as they were packed")
    return {"files": count, "damaged": found, "exit_code": 1 if found else 0}


def _of_flags(values: flags.FlagValues) -> dict[str, Any]:
    """Arguments of ``validate`` from the command's flags."""
    from jaxvlm.config import DataConfig
    from jaxvlm.data.images import image_files
    from jaxvlm.data.tokenizer import chat_tokenizer as tokenizer

    return {
        "config": DataConfig(
            max_length=values.max_length,
            max_images_per_sequence=values.max_images,
            image_root=values.image_root,
        ),
        "chat_tokenizer": tokenizer.load(values.tokenizer) if values.tokenizer else None,
        "prepare": image_files.squares(values.image_size),
        "num_patches": (values.image_size // values.patch_size) ** 2,
    }


def _of_recipe(config: Any, read: Any) -> dict[str, Any]:
    """Arguments of ``validate`` as in a run of the recipe on the records that were read."""
    from jaxvlm.data.conversations import tokenize
    from jaxvlm.hf import pretrained
    from jaxvlm.hf.run_processor import image_format_of, make_tokenizer

    source = pretrained.find_for(config.model)
    if source is not None:
        config = pretrained.with_source(config, source)
    chat_tokenizer = make_tokenizer(config, None, lambda: tokenize.texts(read[0]), source)
    images = image_format_of(config, source, chat_tokenizer)
    return {
        "config": config.data,
        "chat_tokenizer": chat_tokenizer,
        "prepare": images.prepare,
        "patching": images.patching,
        "num_patches": images.of_file,
    }
