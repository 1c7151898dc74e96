"""The command ``jaxvlm mine``, which adds hard negatives to examples."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli import common

SUMMARY = "Mine hard negatives: documents that a model wrongly ranks close to a query."
USAGE = "--checkpoint=FOLDER --data=FILE.jsonl [--corpus=FILE.jsonl] --output=FILE.jsonl"
_FLAGS = {
    "data": "The file of training examples with `query`, `positive`, `negatives`, `query_image`, "
    "`positive_image` and `negative_images` (docs/embedding_data.md); its documents are the "
    "corpus.",
    "corpus": "A .jsonl, .csv, .parquet or .tar file with more documents for the corpus: records "
    "of `text` and `image`.",
    "output": "The .jsonl file to write the examples to, with the mined negatives added.",
    "scores": "Also write `scores`, the similarities of the query with its positive and each "
    "negative.",
    "num_negatives": "The maximum number of negatives to mine for each query.",
    "range_min": "The number of best-scoring candidates to skip, after scores and margins are "
    "applied.",
    "range_max": "The number of best-scoring documents to take as candidates; 0 means range_min + "
    "num_negatives, or range_min + 10 * num_negatives if a score or a margin may exclude "
    "candidates.",
    "seed": "The seed of --sampling=random.",
    "batch_size": "The number of items per batch, over all devices.",
    "dims": "Truncate embeddings to this many dims before the search; 0 keeps all dims.",
    "part_size": "The number of items between two writes to OUTPUT.parts, from which an "
    "interrupted run resumes.",
    "max_score": "The maximum similarity of a negative with its query, a cosine unless the run has "
    "pair_loss.similarity='dot' or the sentence-transformers folder similarity_fn_name='dot'; by "
    "default there is no maximum.",
    "min_score": "The minimum similarity of a negative with its query; by default there is no "
    "minimum.",
    "absolute_margin": "The minimum difference by which a negative must score below its query's "
    "positive; by default there is no margin.",
    "relative_margin": "The minimum difference by which a negative must score below its query's "
    "positive, as a fraction of the positive's score; by default there is no margin. 0.05 is "
    "NV-Retriever's TopK-PercPos at 95 %.",
}

LOCAL = ("output",)
"""Flags that name what can't be in an object store."""


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``mine``."""
    common.define_model(values)
    common.define_instructions(values)
    common.define_reading(values)
    counts = {"num_negatives": 3, "range_min": 0, "range_max": 0, "seed": 0, "dims": 0}
    bounds = dict.fromkeys(("max_score", "min_score", "absolute_margin", "relative_margin"))
    sizes = {"batch_size": 64, "part_size": 4096}
    common.define_flags(values, _FLAGS, scores=False, **counts, **sizes, **bounds)
    flags.DEFINE_enum(
        "sampling",
        "top",
        ["top", "random"],
        "Take the hardest of the remaining candidates (top), or a random choice of them (random).",
        flag_values=values,
    )


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Mine hard negatives, write the examples and return the report."""
    import dataclasses
    import pathlib

    from jaxvlm.config import ConfigError
    from jaxvlm.inference import examples, hard_negatives, items

    common.flags_only("mine", args)
    output = pathlib.Path(values.output)
    if not values.data or output.suffix != ".jsonl":
        raise ConfigError("mine needs --data=FILE and --output=FILE.jsonl")
    inputs = [pathlib.Path(name).resolve() for name in (values.data, values.corpus) if name]
    if output.resolve() in inputs:
        raise ConfigError(f"--output={output} is an input file; give another file")
    settings: dict[str, Any] = {
        field.name: values[field.name].value
        for field in dataclasses.fields(hard_negatives.MiningConfig)
        if field.name in values
    }
    settings["cosine"] = common.compares_by_cosine(values)
    mining = hard_negatives.MiningConfig(**settings)
    how = common.reading(values)
    read = examples.read(values.data, how)
    given, others = examples.split_matching(read)
    more = items.read(values.corpus, how)[0] if values.corpus else []
    gathered = examples.gather(given, [*others, *more])
    hard_negatives.check(len(gathered.documents), mining)
    model = common.load_model("mine", values)
    root = output.with_name(output.name + ".parts")
    embeddings = _embeddings(values, model, gathered, root)
    excluded = hard_negatives.excluded(gathered)
    mined = hard_negatives.mine(*embeddings, gathered.positives, model.model.mesh, mining, excluded)
    scored = embeddings if values.scores else ()
    report = _write(output, (given, how), gathered, mined, scored, mining.cosine)
    for line in _lines(report, mined.excluded, mining):
        common.say(line)
    common.say(f"{len(given)} examples: {output}")
    if len(given) < len(read):
        common.say(
            f"{len(read) - len(given)} examples whose score of 0 or less says that they do not "
            "match are left out; their documents were searched"
        )
    if not values.scores and any(e.scores for e in given) and report["negatives"]:
        common.say("the examples' scores are left out, as new negatives have none; see --scores")
    if unread := examples.settings_to_leave_out(how):
        common.say(f"train from them without {', '.join(unread)}: they are in jaxvlm's own fields")
    return report | {f"struck/{name}": count for name, count in mined.excluded.items()}


def _embeddings(values: flags.FlagValues, model: Any, gathered: Any, root: Any) -> tuple[Any, Any]:
    """Embed queries and documents, on disk."""
    from jaxvlm.inference.embed_corpus import in_parts

    sizes = {name: values[name].value for name in ("batch_size", "dims", "part_size")}

    def embed(name: str, some: Any) -> Any:
        settings = common.embed_settings(values, model, name, **sizes)
        return in_parts(model, some, root / name, settings, values.checkpoint, title=name)

    return embed("query", gathered.queries), embed("document", gathered.documents)


def _write(
    output: Any, source: Any, gathered: Any, mined: Any, embeddings: Any, cosine: bool
) -> dict[str, Any]:
    """Write the examples from process 0, delete the embeddings and return the report.

    ``source`` is the examples that were read, and the settings by which they were.
    """
    import jax
    import numpy as np

    from jaxvlm.inference import embed_corpus, examples, hard_negatives

    given, how = source
    written, documents = hard_negatives.with_negatives(given, gathered, mined)
    scores: list[Any] = [()] * len(written)
    if embeddings and not jax.process_index():
        query = np.repeat([q for q, _, _ in gathered.indices], [len(x) for x in documents])
        flat = hard_negatives.similarities(
            embeddings[0], embeddings[1], query, np.concatenate(documents), cosine
        )
        ends = np.cumsum([len(x) for x in documents])[:-1]
        scores = [some.tolist() for some in np.split(flat, ends)]
    if not jax.process_index():
        pairs = zip(written, scores, strict=True)
        root = examples.root_of(output, how)
        examples.write(output, (examples.record(e, root, some) for e, some in pairs))
    embed_corpus.remove(output.with_name(output.name + ".parts"))
    is_mined, paired = mined.document >= 0, mined.positive[np.isfinite(mined.positive)]
    of_query = is_mined.sum(axis=1)
    return {
        "examples": len(written),
        "queries": len(gathered.queries),
        "documents": len(gathered.documents),
        "negatives": int(of_query.sum()),
        "short": int(np.sum(of_query < is_mined.shape[1])),
        "none": int(np.sum(of_query == 0)),
        "positive_score": float(paired.mean()) if len(paired) else 0.0,
        "negative_score": float(mined.score[is_mined].mean()) if is_mined.any() else 0.0,
    }


def _lines(report: dict[str, Any], excluded: dict[str, int], mining: Any) -> list[str]:
    """Format the report for people."""
    lines = [
        f"{report['queries']} queries, {report['documents']} documents: {report['negatives']} "
        f"negatives; mean {'cosine' if mining.cosine else 'dot product'} "
        f"{report['negative_score']:.4f}, of positives {report['positive_score']:.4f}"
    ]
    lines += [
        f"  {name}={getattr(mining, name):g} excluded {count} candidates"
        for name, count in excluded.items()
    ]
    if report["short"]:
        lines.append(
            f"  {report['short']} queries have fewer than {mining.num_negatives} negatives, "
            f"{report['none']} have none: a larger --range_max or a looser score or margin gives "
            "more"
        )
    return lines
