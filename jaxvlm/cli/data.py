"""The command ``jaxvlm data``, which checks a data file before training, or packs it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import flags

from jaxvlm.cli.common import define_flags, define_recipe

SUMMARY = (
    "Check a data file: list the records that training would refuse, by reason; or pack it; or "
    "fetch what its URLs name."
)
USAGE = (
    "check [FILE] [--config=RECIPE[:arg] | --max_length=N --image_size=N ...]\n"
    "       jaxvlm data pack [FILE] --config=RECIPE[:arg] --output=FOLDER\n"
    "       jaxvlm data verify FOLDER\n"
    "       jaxvlm data fetch [FILE] [--config=RECIPE[:arg]] --output=FOLDER --hosts=HOST,…"
)
_FLAGS = {
    "tokenizer": "The folder of the tokenizer; by default a word tokenizer is built from the file.",
    "max_length": "The maximum number of tokens in a packed sequence.",
    "image_size": "The height and width of images, in pixels.",
    "patch_size": "The height and width of a patch, in pixels.",
    "max_images": "The maximum number of images, or of tiles of images, in a packed sequence.",
    "image_root": "The folder that image names are relative to, or its gs:// or s3:// URL; by "
    "default the data file's folder.",
    "look_alikes": "Also list images of one colour, and those that look like an earlier one: whose "
    "perceptual hashes differ in at most so many of 64 bits (0 to 16; 4 finds other sizes and "
    "qualities of one image). For conversations; needs pip install 'jaxvlm[check]'. The default -1 "
    "looks for none.",
    "output": "For `pack`: the folder, or the gs:// or s3:// URL, that the set is written to; "
    "config.data.train then names it. A mixture's sources are in folders of their names there. For "
    "`fetch`: the folder that keeps the files; config.data.fetched then names it.",
    "shard_mb": "For `pack`: the size of a tar file of images, about, in MiB.",
    "hosts": "For `fetch`: the hosts that may be asked for images and videos, comma-separated; "
    "*.example.com are those below one, and * all that have public addresses. Without it they are "
    "listed.",
    "max_mb": "For `fetch`: the largest size of a file, in MiB.",
    "timeout_s": "For `fetch`: the seconds without an answer after which a request has failed.",
    "requests": "For `fetch`: the number of requests at a time.",
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
        hosts=[],
        max_mb=32,
        timeout_s=30,
        requests=16,
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
    if args[:1] == ["fetch"] and len(args) <= 2:
        from jaxvlm.cli import data_fetch

        return data_fetch.run(values, *args[1:])
    if len(args) != 2 or args[0] != "check":
        raise ConfigError(
            "usage: jaxvlm data check FILE [--config=RECIPE] (without FILE the recipe has a "
            "mixture), data pack [FILE] --config=RECIPE --output=FOLDER, data verify FOLDER, or "
            "data fetch [FILE] --output=FOLDER --hosts=HOST,…"
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
    if values.plot and reports:
        from jaxvlm.data import check_plot

        check_plot.draw(reports, values.plot)
        print(f"plot: {values.plot}")


def _checked(values: flags.FlagValues, spec: str) -> Any:
    """Validate a file: as pairs if the recipe trains embeddings, else as conversations."""
    from jaxvlm.config import Config, ConfigError, formats_of, from_config_dict, refuse_unread_by
    from jaxvlm.data import validate
    from jaxvlm.data.conversations.mixture_records import of_file
    from jaxvlm.data.sources import conversation_formats
    from jaxvlm.losses.registry import trains_embeddings
    from jaxvlm.trainer import checks, embedding_run

    if values.config is None:
        settings = _of_flags(values)
        refuse_unread_by(settings["config"], formats_of(settings["config"], spec))
        checks.check_image_root("--image_root", values.image_root)
        return validate.validate(spec, look_alikes=values.look_alikes, **settings)
    config: Config = from_config_dict(values.config)
    names = (spec, config.data.train, config.data.eval)
    refuse_unread_by(config.data, formats_of(config.data, *names))
    if trains_embeddings(config):
        if values.look_alikes >= 0 or values.plot:
            raise ConfigError("--look_alikes and --plot are for conversations, not for pairs")
        return embedding_run.validate_file(config, spec)
    config = dataclasses.replace(config, data=of_file(config.data, spec))
    read = conversation_formats.read(spec, config.data)
    how, _ = _of_recipe(config, read[0])
    return validate.validate(spec, look_alikes=values.look_alikes, given=read, **how)


def _mixture(values: flags.FlagValues) -> dict[str, Any]:
    """Check each source of a recipe's mixture."""
    from jaxvlm.config import from_config_dict
    from jaxvlm.data import validate
    from jaxvlm.data.conversations import mixture_records
    from jaxvlm.trainer.checks import check_data

    config = from_config_dict(values.config)
    check_data(config)
    _check_flags(values)
    read = mixture_records.read(config.data)
    records = itertools.chain.from_iterable(own for own, _ in read.values())
    how, of_model = _of_recipe(config, records)
    how["look_alikes"] = values.look_alikes
    reports, shares, can_run = validate.validate_mixture(
        how.pop("config"), config.seed, read, of_model, **how
    )
    for line in (*(line for report in reports for line in report.lines()), *shares):
        print(line)
    _draw(values, reports)
    found = {name: x.to_dict() for name, x in zip(read, reports, strict=True)}
    failed = any(report.problems for report in reports) or not can_run
    return {"sources": found, "shares": shares, "exit_code": 1 if failed else 0}


def _pack(values: flags.FlagValues, spec: str = "") -> dict[str, Any]:
    """Pack the training data of a recipe, or a file as if the recipe named it."""
    from jaxvlm.config import ConfigError, from_config_dict
    from jaxvlm.data.conversations.content import is_packed
    from jaxvlm.data.packed import packed_files
    from jaxvlm.data.sources.member_names import is_remote
    from jaxvlm.losses.registry import trains_embeddings
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
    names = [name for name, x in config.data.mixture.items() if not is_packed(x.train, config.data)]
    outputs = {name: f"{values.output.rstrip('/')}/{name}" for name in names}
    outputs = outputs or {"": values.output}
    sets = {name: x.train for name, x in config.data.mixture.items()} | outputs
    done = [name for name in names if is_packed(outputs[name], config.data)]
    if done:
        flags_of = " ".join(f"--config.data.mixture.{name}.train={outputs[name]}" for name in done)
        raise ConfigError(
            f"{outputs[done[0]]} is packed already: to pack the others, add {flags_of}"
        )
    for output in outputs.values():
        packed_files.refuse_existing(output)
    if trains_embeddings(config):
        return _pack_pairs(config, values.output, values.shard_mb * 2**20)
    prepared = inputs.prepare_conversations(config, None)
    whole, reports = prepared.dataset.content, {}
    contents = dict(zip(config.data.mixture, whole.sources)) or {"": whole}
    for name, output in outputs.items():
        with packed_files.new_folder(output) as folder:
            report = _write_set(folder, contents[name], prepared, values.shard_mb * 2**20)
        print(
            f"{output}: {report['records']:,} records, {report['images']:,} images, "
            f"{report['sequences']:,} packed sequences, {_rest(report)}"
        )
        reports[name] = report
    for name in config.data.mixture:
        print(f"--config.data.mixture.{name}.train={sets[name]}")
    return {"sources": reports} if names else reports[""]


def _pack_pairs(config: Any, output: str, shard_bytes: int) -> dict[str, Any]:
    """Pack the pairs that a run of the recipe would train on."""
    from jaxvlm.data.packed import packed_files
    from jaxvlm.data.pairs import packed_pairs
    from jaxvlm.trainer import embedding_run, pair_design

    prepared = embedding_run.prepare_pairs(config, None)
    for line in pair_design.check_fields(config, prepared.dataset):
        print(line)
    data, data_config = prepared.dataset, prepared.dataset.config
    made = packed_pairs.made_for(data_config, (data.queries.collator, data.documents.collator))
    problems = _left_out(data.problems)
    with packed_files.new_folder(output) as folder:
        index = packed_pairs.write(
            folder, data.corpus, made, prepared.tokenizer, data_config, shard_bytes
        )
    report = _report(index, ("records", "queries", "documents", "images", "tokens"), problems)
    print(
        f"{output}: {report['records']:,} examples, {report['queries']:,} queries, "
        f"{report['documents']:,} documents, {report['images']:,} images, {_rest(report)}"
    )
    return report


def _write_set(folder: pathlib.Path, content: Any, prepared: Any, size: int) -> dict[str, Any]:
    """Write a packed set, and return what there is in it, and what is left out."""
    from jaxvlm.data.conversations import packed_set

    problems = _left_out([problem for part in content.parts for problem in part.problems])
    config, settings = prepared.dataset.config, prepared.dataset.settings
    made = packed_set.made_for(config, settings, prepared.tokenizer, content.facts.has_videos)
    index = packed_set.write(folder, content, made, prepared.tokenizer, config, size)
    return _report(index, ("records", "images", "sequences", "tokens"), problems)


def _left_out(problems: Sequence[Any]) -> dict[str, list[str]]:
    """Print what is not packed, and return its ids by reason."""
    reasons: dict[str, list[str]] = {}
    for problem in problems:
        reasons.setdefault(problem.reason, []).append(problem.id)
    for reason, ids in reasons.items():
        more = ", ..." if len(ids) > 3 else ""
        print(f"left out: {len(ids):,}  {reason}: {', '.join(ids[:3])}{more}")
    return reasons


def _report(
    index: dict[str, Any], names: Sequence[str], problems: dict[str, list[str]]
) -> dict[str, Any]:
    report: dict[str, Any] = {name: index[name] for name in names}
    report |= {"left_out": len(index["left_out"]), "problems": problems}
    return report | {"bytes": sum(size for size, _ in index["files"].values())}


def _rest(report: dict[str, Any]) -> str:
    size = report["bytes"] / 2**20
    return f"{size:,.1f} MiB; {report['left_out']:,} records are left out"


def _verify(folder: str) -> dict[str, Any]:
    """Read all of a packed set, and exit 1 if a file is not as it was packed."""
    from jaxvlm.config import ConfigError, DataConfig
    from jaxvlm.data.conversations.content import is_packed
    from jaxvlm.data.errors import Problem
    from jaxvlm.data.packed import packed_files

    if not is_packed(folder, DataConfig()):
        what = "is no packed set" if os.path.exists(folder) else "does not exist"
        raise ConfigError(f"{folder} {what}; `jaxvlm data pack` makes a folder with a packed.json")
    found = dict(packed_files.damaged(folder))
    for name, what in found.items():
        print(f"{folder}/{name}: {what}")
    index = packed_files.read_index(folder)
    count = len(index["files"])
    problems = _left_out([Problem(*problem) for problem in index.get("left_out", ())])
    print(f"{folder}: {count - len(found)} of {count} files are as they were packed")
    return {"files": count, "damaged": found, "left_out": problems, "exit_code": 1 if found else 0}


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


def _of_recipe(config: Any, records: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of ``validate`` as in a run of the recipe on the records that were read, and what
    else the data depend on."""
    from jaxvlm.data.conversations import tokenize
    from jaxvlm.hf import pretrained
    from jaxvlm.hf.run_processor import image_format_of, make_tokenizer

    source = pretrained.find_for(config.model)
    if source is not None:
        config = pretrained.with_source(config, source)
    chat_tokenizer = make_tokenizer(config, None, lambda: tokenize.texts(records), source)
    images = image_format_of(config, source, chat_tokenizer)
    how = {
        "config": config.data,
        "chat_tokenizer": chat_tokenizer,
        "prepare": images.prepare,
        "patching": images.patching,
        "num_patches": images.of_file,
    }
    return how, {"image_size": images.size, "visual_mask": config.model.decoder.visual_mask}
