"""The command ``jaxvlm eval``, which evaluates a trained model."""

from __future__ import annotations

import dataclasses
from typing import Any

from absl import flags

from jaxvlm.cli import common

SUMMARY = "Evaluate a model: exact match of its answers, or the retrieval of its embeddings."
USAGE = (
    "--checkpoint=WORKDIR [--data=FILE] [--data_format=built_in] [--limit=N]\n"
    "                   [--prediction_grid=FILE.png] [--mesh=fsdp=4,tensor=2]\n"
    "       jaxvlm eval --checkpoint=ENCODER --data=PAIRS.jsonl [--ks=1,5,10] [--dims=64,128]\n"
    "       jaxvlm eval --checkpoint=ENCODER --data=IMAGES.jsonl --classes=cat,dog|NAMES.txt"
)
_RETRIEVAL_FLAGS = (
    *("corpus", "ks", "dims", "precisions", "query_instruction", "document_instruction"),
    "batch_size",
)
_FLAGS = {
    "data": "The data file to evaluate on; by default the run's config.data.eval. For an "
    "embedding model it holds examples with `query`, `positive`, `query_image` and "
    "`positive_image` (docs/embedding_data.md).",
    "limit": "The maximum number of records to evaluate; 0 evaluates all.",
    "prediction_grid": "Write a PNG grid of images with the model's answers, or of queries with "
    "the documents that they retrieve, to this file.",
    "retrieval": "Measure retrieval with the model's embeddings. Encoders are always evaluated "
    "this way.",
    "corpus": "Retrieval: a .jsonl, .csv, .parquet or .tar file with more documents to search: "
    "records with `text` and `image`.",
    "ks": "Retrieval and zero-shot classification: report the metrics at these cut-offs k.",
    "dims": "Retrieval: also measure the embeddings truncated to each of these numbers of dims.",
    "precisions": "Retrieval: also measure the embeddings quantized to each of these precisions, "
    "int8 or binary.",
    "classes": "Zero-shot classification: the class names, as A,B,C, as a file with one name per "
    "line, or as `labels` for those in the data, whose records have `image` and `label`.",
    "template": "Zero-shot classification: the prompt of a class, with {} for its name; if the "
    "flag is repeated, a class is the mean of its prompts' embeddings.",
    "seed": "The seed of the places that --kv=random keeps.",
    "batch_size": "Embeddings, and --kv: the number of items per batch, over all devices; by "
    "default 64, or with --kv the run's.",
}


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``eval``."""
    common.define_model(values)
    common.define_instructions(values, "Embeddings: the ")
    common.define_reading(values)
    lists: dict[str, Any] = {"ks": ["1", "5", "10"], "dims": [], "precisions": []}
    lists["template"] = ("a photo of a {}.",)
    common.define_flags(values, _FLAGS, limit=0, seed=0, retrieval=False, batch_size=64, **lists)
    common.define_kv(values)
    common.define_cache(values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Evaluate the model, print the report and return the metrics."""
    from jaxvlm.config import ConfigError
    from jaxvlm.data.errors import DataError
    from jaxvlm.inference import embedding_evaluator
    from jaxvlm.inference.encoder import Encoder

    common.flags_only("eval", args)
    kv = common.kv_settings(values)
    if values.classes:
        return _classes(values)
    if values["template"].present:
        raise ConfigError("--template is for zero-shot classification: add --classes")
    compressed = values.kv != "none"
    if values["seed"].present and values.kv != "random":
        raise ConfigError("--seed is for --kv=random; leave it out")
    if compressed and values.retrieval:
        raise ConfigError(f"--kv={values.kv} is for answers, not for --retrieval; leave one out")
    given = _pairs(values) if values.retrieval else None  # fails before the model is loaded
    model = common.load_model("eval", values)
    embeds = isinstance(model, Encoder) or embedding_evaluator.run_of(model)
    if compressed and embeds:
        raise ConfigError(f"--kv={values.kv} is for answers, not for embeddings; leave it out")
    if not (embeds or values.retrieval):
        common.use_cache(values, model)
    elif cached := [name for name in common.CACHE if values[name].present]:
        raise ConfigError(f"--{cached[0]} is for answers, not for embeddings; leave it out")
    if values.retrieval or (isinstance(model, Encoder) and model.run is None):
        return _retrieval(values, model, *(given or _pairs(values)))
    target = _choose_format(values, model)
    try:
        return _of_run(values, model, kv)
    except DataError as error:
        if not target:
            raise
        raise DataError(
            f"{error}; the run's config.data.format.target={target!r} reads it, and "
            "--data_format=built_in reads jaxvlm's own formats"
        ) from None


def _choose_format(values: flags.FlagValues, model: Any) -> str:
    """Say, or change, what reads ``--data``; returns the target where that is the run's own."""
    from jaxvlm.config import ConfigError, formats_of, refuse_unread_by
    from jaxvlm.inference.encoder import Encoder

    name = "run" if isinstance(model, Encoder) else "config"
    config = getattr(model, name)
    for flag in common.READING:
        if values[flag].present and not values.data:
            raise ConfigError(f"--{flag} is for --data=FILE; add it, or leave --{flag} out")
    if values.data:
        config = dataclasses.replace(config, data=common.flagged(values, config.data))
    flags_given = [flag for flag in ("ignored_fields", "literal_markers") if values[flag].present]
    refuse_unread_by(config.data, formats_of(config.data, values.data), flags_given)
    setattr(model, name, config)
    target = str(config.data.format.target) if values.data else ""
    if target:
        common.say(f"{values.data} is read by the run's config.data.format.target={target!r}")
    return target


def _of_run(values: flags.FlagValues, model: Any, kv: dict[str, Any]) -> dict[str, Any]:
    """Evaluate as in training: exact match, or the retrieval of a run that trained embeddings."""
    from jaxvlm.config import ConfigError
    from jaxvlm.inference import embedding_evaluator

    if embedding_evaluator.run_of(model):
        if given := [name for name in (*_RETRIEVAL_FLAGS, "limit") if values[name].present]:
            raise ConfigError(
                f"--{given[0]} needs --retrieval; without it a run is evaluated as in training"
            )
        report = embedding_evaluator.evaluate(
            model, values.data, prediction_grid=values.prediction_grid
        )
        for line in report.lines():
            common.say(line)
        return report.metrics
    given = [name for name in _RETRIEVAL_FLAGS if values[name].present]
    if values.kv != "none" and "batch_size" in given:
        given.remove("batch_size")
    if given:
        raise ConfigError(f"--{given[0]} is for embeddings: add --retrieval")
    report = model.evaluate(
        values.data,
        limit=values.limit,
        prediction_grid=values.prediction_grid,
        seed=values["seed"].value,
        batch_size=values.batch_size if values["batch_size"].present else 0,
        **kv,
    )
    for line in report.lines():
        common.say(line)
    common.say_cached(model)
    if values.kv != "none":
        common.say(f"of the last batch: {model.kv_memory.text()}")
    result = report.metrics | {f"blind/{name}": value for name, value in report.blind.items()}
    return result | common.inference_figures(model)


def _classes(values: flags.FlagValues) -> dict[str, Any]:
    from jaxvlm.config import ConfigError
    from jaxvlm.inference import zero_shot

    others = ("corpus", "retrieval", "prediction_grid", "dims", "precisions", "literal_markers")
    for name in (*others, "kv", "seed", *common.CACHE):
        if values[name].present:
            raise ConfigError(f"--{name} does not go with --classes; leave one out")
    if not values.data:
        raise ConfigError("--classes needs --data=FILE with records of `image` and `label`")
    items, labels = zero_shot.read(values.data, common.reading(values))
    items, labels = items[: values.limit or None], labels[: values.limit or None]
    names = zero_shot.classes_of(values.classes, labels)
    ks = _numbers("ks", values.ks) if values["ks"].present else ()
    model = common.load_model("eval", values)
    settings = [
        common.embed_settings(values, model, side, batch_size=values.batch_size)
        for side in ("query", "document")
    ]
    if settings[0] != settings[1]:
        images, prompts = (f"the instruction {some.instruction!r}" for some in settings)
        common.say(
            f"images are embedded as queries, with {images}, and prompts as documents, with "
            f"{prompts}; --query_instruction and --document_instruction change them"
        )
    report = zero_shot.evaluate(model, (items, labels), names, values.template, ks, *settings)
    for line in report.lines():
        common.say(line)
    return report.metrics


def _pairs(values: flags.FlagValues) -> tuple[Any, Any]:
    """Read the examples of ``--data`` and the items of ``--corpus``."""
    from jaxvlm.config import ConfigError
    from jaxvlm.inference import examples, items

    if not values.data:
        raise ConfigError("eval of an embedding model needs --data=FILE with queries and positives")
    how = common.reading(values)
    pairs = examples.read(values.data, how)[: values.limit or None]
    return pairs, items.read(values.corpus, how)[0] if values.corpus else []


def _retrieval(values: flags.FlagValues, model: Any, pairs: Any, more: Any) -> dict[str, Any]:
    from jaxvlm.evals.retrieval import Retrieval
    from jaxvlm.inference import embedding_evaluator, examples, retrieval

    ks, dims = _numbers("ks", values.ks), _numbers("dims", values.dims)
    if not values["ks"].present:  # drop cut-offs beyond the corpus size
        count = len(examples.gather(pairs, more).documents)
        ks = tuple(k for k in ks if k <= max(count, 1))
    precisions = tuple(values.precisions)
    run = embedding_evaluator.run_of(model)
    if run is not None:
        dims = dims if values["dims"].present else run.pair_loss.matryoshka_dims
        precisions = precisions if values["precisions"].present else run.pair_loss.precisions
    settings = Retrieval(ks, dims, cosine=common.compares_by_cosine(values))
    query, document = (
        common.embed_settings(values, model, side, batch_size=values.batch_size)
        for side in ("query", "document")
    )
    grid = values.prediction_grid
    report = retrieval.evaluate(model, pairs, settings, query, document, more, grid, precisions)
    for line in report.lines():
        common.say(line)
    return report.metrics


def _numbers(flag: str, texts: list[str]) -> tuple[int, ...]:
    from jaxvlm.config import ConfigError

    if bad := [text for text in texts if not text.strip().isdecimal()]:
        raise ConfigError(
            f"--{flag}={','.join(texts)}: {bad[0]!r} is not a whole number; give some, as in 1,5,10"
        )
    return tuple(int(text) for text in texts)
