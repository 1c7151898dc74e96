"""``jaxvlm eval``."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_instructions, define_model, load_model, say

SUMMARY = "Exact match of a trained model, or what an embedding model finds; and a control."
USAGE = (
    "--checkpoint=WORKDIR [--data=FILE] [--limit=N] [--sheet=FILE.png] [--mesh=fsdp=4,tensor=2]\n"
    "       jaxvlm eval --checkpoint=ENCODER --data=PAIRS.jsonl [--ks=1,5,10] [--dims=64,128]\n"
    "       jaxvlm eval --checkpoint=ENCODER --data=PICTURES.jsonl --classes=cat,dog|NAMES.txt"
)
_OF_VECTORS = (
    *("corpus", "ks", "dims", "precisions", "query_instruction", "document_instruction"),
    "batch_size",
)


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``eval``."""
    define_model(values)
    flags.DEFINE_string(
        "data",
        "",
        "Data file; the run's own config.data.eval if not given. Of an embedding model: examples "
        "with `query`, `positive`, `query_image`, `positive_image` (docs/embedding_data.md).",
        flag_values=values,
    )
    flags.DEFINE_integer("limit", 0, "Records at most; 0 is all.", flag_values=values)
    flags.DEFINE_string(
        "sheet",
        "",
        "Write a contact sheet to this PNG: pictures and answers, or queries and what they found.",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "retrieval",
        False,
        "Measure what the model's vectors find; an encoder does nothing else.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "corpus", "", "Retrieval: more documents, FILE.jsonl, .csv, ….", flag_values=values
    )
    flags.DEFINE_list("ks", ["1", "5", "10"], "Retrieval: cut-offs.", flag_values=values)
    flags.DEFINE_list(
        "dims", [], "Retrieval: prefixes of the vectors to measure too.", flag_values=values
    )
    flags.DEFINE_list(
        "precisions",
        [],
        "Retrieval: int8, binary: what vectors find that are kept so, too.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "classes",
        "",
        "Zero-shot classification: names of classes, A,B,C, a file of one a line, or `labels`: "
        "those of the data, whose records have `image` and `label`.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "template",
        ["a photo of a {}."],
        "Zero-shot: a prompt, {} being the class; given several times, a class is their mean.",
        flag_values=values,
    )
    define_instructions(values, "Vectors: ")
    flags.DEFINE_integer("batch_size", 64, "Retrieval: items at a time.", flag_values=values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Evaluate and print the report."""
    from jaxvlm.build import pair_run
    from jaxvlm.build.encoder import Encoder
    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"eval takes flags only, not {args[0]!r}")
    if values.classes:
        return _classes(values)
    if values["template"].present:
        raise ConfigError("--template is of zero-shot classification: give --classes")
    if values.retrieval:
        _pairs(values)  # before the model is loaded
    model = load_model("eval", values)
    if pair_run.is_run(model) and not values.retrieval:
        if given := [name for name in (*_OF_VECTORS, "limit") if values[name].present]:
            raise ConfigError(
                f"--{given[0]} goes with --retrieval; without it a run is evaluated as in training"
            )
        report = pair_run.evaluate(model, values.data, sheet=values.sheet)
        for line in report.lines():
            say(line)
        return report.metrics
    if values.retrieval or isinstance(model, Encoder):
        return _retrieval(values, model)
    if given := [name for name in _OF_VECTORS if values[name].present]:
        raise ConfigError(f"--{given[0]} is of vectors: add --retrieval")
    report = model.evaluate(values.data, limit=values.limit, sheet=values.sheet)
    for line in report.lines():
        say(line)
    return report.metrics | {f"blind/{name}": value for name, value in report.blind.items()}


def _classes(values: flags.FlagValues) -> dict[str, Any]:
    from jaxvlm.build import classify
    from jaxvlm.build.embedding import Embedding
    from jaxvlm.config import ConfigError

    for name in ("corpus", "retrieval", "sheet", "dims", "precisions"):
        if values[name].present:
            raise ConfigError(f"--{name} does not go with --classes")
    if not values.data:
        raise ConfigError("--classes needs --data=FILE of pictures: records of image and label")
    items, labels = classify.read(values.data)
    items, labels = items[: values.limit or None], labels[: values.limit or None]
    names = classify.classes_of(values.classes, labels)
    ks = _numbers("ks", values.ks) if values["ks"].present else ()
    model = load_model("eval", values)
    how = (
        Embedding(values.batch_size, 0, x)
        for x in (values.query_instruction, values.document_instruction)
    )
    report = classify.evaluate(model, (items, labels), names, values.template, ks, *how)
    for line in report.lines():
        say(line)
    return report.metrics


def _pairs(values: flags.FlagValues) -> Any:
    from jaxvlm.build import examples
    from jaxvlm.config import ConfigError

    if not values.data:
        raise ConfigError("eval of an embedding model needs --data=FILE with queries and positives")
    return examples.read(values.data)[: values.limit or None]


def _retrieval(values: flags.FlagValues, model: Any) -> dict[str, Any]:
    from jaxvlm.build import examples, items, retrieval
    from jaxvlm.build.embedding import Embedding
    from jaxvlm.evals.retrieval import Retrieval

    given = _pairs(values)
    more = items.read(values.corpus)[0] if values.corpus else []
    ks, dims = _numbers("ks", values.ks), _numbers("dims", values.dims)
    if not values["ks"].present:  # those that a small corpus has room for
        count = len(examples.gather(given, more).documents)
        ks = tuple(k for k in ks if k <= max(count, 1))
    what = Retrieval(ks, dims)
    query = Embedding(values.batch_size, 0, values.query_instruction)
    document = Embedding(values.batch_size, 0, values.document_instruction)
    few = tuple(values.precisions)
    report = retrieval.evaluate(model, given, what, query, document, more, values.sheet, few)
    for line in report.lines():
        say(line)
    return report.metrics


def _numbers(flag: str, texts: list[str]) -> tuple[int, ...]:
    from jaxvlm.config import ConfigError

    if bad := [text for text in texts if not text.strip().isdecimal()]:
        raise ConfigError(f"--{flag}={','.join(texts)}: {bad[0]!r} is no whole number")
    return tuple(int(text) for text in texts)
