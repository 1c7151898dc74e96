"""``jaxvlm mine``."""

from __future__ import annotations

from typing import Any

from absl import flags

from jaxvlm.cli.common import define_instructions, define_model, load_model, say

SUMMARY = "Find hard negatives: what a model takes for right and is not."
USAGE = "--checkpoint=FOLDER --data=FILE.jsonl [--corpus=FILE.jsonl] --output=FILE.jsonl"


def define(values: flags.FlagValues, argv: list[str]) -> None:
    """Declare the flags of ``mine``."""
    define_model(values)
    _define_files(values)
    for name, default, text in (
        ("num_negatives", 3, "Negatives of a query, at most."),
        ("range_min", 0, "Of the candidates that the bounds leave, pass over the best so many."),
        (
            "range_max",
            0,
            "Candidates: the best so many documents. 0: range_min and num_negatives, of these ten "
            "times as many where a bound may strike some out.",
        ),
        ("seed", 0, "Of --sampling=random."),
        ("batch_size", 64, "Items at a time, over all devices."),
        ("dims", 0, "Compare the first so many dims of vectors; 0 is all."),
        ("part_size", 4096, "Items between two writes to OUTPUT.parts."),
    ):
        flags.DEFINE_integer(name, default, text, flag_values=values)
    for name, text in (
        ("max_score", "Cosine of a negative, at most."),
        ("min_score", "Cosine of a negative, at least."),
        ("absolute_margin", "By how much a negative scores below its query's positive."),
        (
            "relative_margin",
            "The same as a share of the positive's score; 0.05 is NV-Retriever's TopK-PercPos at "
            "95 %.",
        ),
    ):
        flags.DEFINE_float(name, None, text, flag_values=values)
    flags.DEFINE_enum(
        "sampling",
        "top",
        ["top", "random"],
        "The hardest that are left, or any of them.",
        flag_values=values,
    )


def _define_files(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "data",
        "",
        "Examples, as a run is trained on them: `query`, `positive`, `negatives`, and "
        "`query_image`, `positive_image`, `negative_images` (docs/embedding_data.md). Its "
        "documents are the corpus.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "corpus",
        "",
        "More documents, FILE.jsonl, .csv, .parquet or .tar: `text`, `image`.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "output", "", "FILE.jsonl: the same examples with more negatives.", flag_values=values
    )
    flags.DEFINE_bool(
        "scores",
        False,
        "Also write `scores`, cosines of the positive and each negative.",
        flag_values=values,
    )
    define_instructions(values)


def run(values: flags.FlagValues, args: list[str]) -> dict[str, Any]:
    """Mine, and say what was found."""
    import dataclasses
    import pathlib

    from jaxvlm.build import examples, items, mining
    from jaxvlm.config import ConfigError

    if args:
        raise ConfigError(f"mine takes flags only, not {args[0]!r}")
    output = pathlib.Path(values.output)
    if not values.data or output.suffix != ".jsonl":
        raise ConfigError("mine needs --data=FILE and --output=FILE.jsonl")
    read = [pathlib.Path(name).resolve() for name in (values.data, values.corpus) if name]
    if output.resolve() in read:
        raise ConfigError(f"--output={output} is a file that is read; name another")
    settings: dict[str, Any] = {
        field.name: values[field.name].value for field in dataclasses.fields(mining.Mining)
    }
    how = mining.Mining(**settings)
    given = examples.read(values.data)
    more = items.read(values.corpus)[0] if values.corpus else []
    gathered = examples.gather(given, more)
    mining.check(len(gathered.documents), how)
    model = load_model("mine", values)
    root = output.with_name(output.name + ".parts")
    sides = _vectors(values, model, gathered, root)
    apart = mining.excluded(gathered)
    mined = mining.mine(*sides, gathered.right, model.model.mesh, how, apart)
    report = _write(output, given, gathered, mined, sides if values.scores else ())
    for line in _lines(report, mined.struck, how):
        say(line)
    say(f"{len(given)} examples: {output}")
    return report | {f"struck/{name}": count for name, count in mined.struck.items()}


def _vectors(values: flags.FlagValues, model: Any, gathered: Any, root: Any) -> tuple[Any, Any]:
    """Of queries and of documents, on disk."""
    from jaxvlm.build.embedding import Embedding, in_parts

    def side(name: str, some: Any, told: str) -> Any:
        how = Embedding(values.batch_size, values.dims, told, values.part_size)
        return in_parts(model, some, root / name, how, values.checkpoint, title=name)

    return (
        side("query", gathered.queries, values.query_instruction),
        side("document", gathered.documents, values.document_instruction),
    )


def _write(output: Any, given: Any, gathered: Any, mined: Any, sides: Any) -> dict[str, Any]:
    """The file, from process 0; the report. The vectors are removed."""
    import jax
    import numpy as np

    from jaxvlm.build import embedding, examples, mining

    made, of = mining.with_negatives(given, gathered, mined)
    scores: list[Any] = [()] * len(made)
    if sides and not jax.process_index():
        query = np.repeat([q for q, _, _ in gathered.places], [len(x) for x in of])
        flat = mining.cosines(sides[0], sides[1], query, np.concatenate(of))
        ends = np.cumsum([len(x) for x in of])[:-1]
        scores = [some.tolist() for some in np.split(flat, ends)]
    if not jax.process_index():
        pairs = zip(made, scores, strict=True)
        root = output.parent.absolute()
        examples.write(output, (examples.record(e, root, some) for e, some in pairs))
    embedding.remove(output.with_name(output.name + ".parts"))
    there, paired = mined.document >= 0, mined.positive[np.isfinite(mined.positive)]
    of_query = there.sum(axis=1)
    return {
        "examples": len(made),
        "queries": len(gathered.queries),
        "documents": len(gathered.documents),
        "negatives": int(of_query.sum()),
        "short": int(np.sum(of_query < there.shape[1])),
        "none": int(np.sum(of_query == 0)),
        "positive_score": float(paired.mean()) if len(paired) else 0.0,
        "negative_score": float(mined.score[there].mean()) if there.any() else 0.0,
    }


def _lines(report: dict[str, Any], struck: dict[str, int], how: Any) -> list[str]:
    """The report for people."""
    lines = [
        f"{report['queries']} queries, {report['documents']} documents: {report['negatives']} "
        f"negatives; mean cosine {report['negative_score']:.4f}, of positives "
        f"{report['positive_score']:.4f}"
    ]
    lines += [
        f"  {name}={getattr(how, name):g} struck out {count} candidates"
        for name, count in struck.items()
    ]
    if report["short"]:
        lines.append(
            f"  {report['short']} queries have fewer than {how.num_negatives} negatives, "
            f"{report['none']} none: a larger --range_max or a wider bound gives more"
        )
    return lines
