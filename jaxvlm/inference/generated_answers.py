"""Exact match of answers that are generated one by one, as a compressed KV cache needs.

Scoring whole sequences (:mod:`jaxvlm.evals.exact_match`) reads answers with the prompt's whole KV
cache. Here each prompt is read, compressed, and answered; an answer is right if its text is the
reference's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxvlm.config import ConfigError
from jaxvlm.data.conversations.dataset import Dataset
from jaxvlm.data.conversations.packing import bucket
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.inference.evaluator import Report

Answer = Callable[[Sequence[np.ndarray], Sequence[Sequence[str]], Sequence[int], int], list[str]]
"""Maps prompts (tokens, each image one), their image files, their records' indices and a number of
new tokens to texts."""


def evaluate(
    answer: Answer, dataset: Dataset, batch_size: int, limit: int = 0, blind: bool = True
) -> Report:
    """Measure exact match over a data set, with and without the right images.

    Args:
        answer: generates the answers of ``batch_size`` prompts.
        dataset: records of one answer each.
        batch_size: prompts at a time; the last ones are filled up.
        limit: maximum number of records; 0: all.
        blind: whether to run the control with other records' images.

    Returns:
        ``exact_match``, ``exact_match/<kind>`` and ``answers``.

    Raises:
        ConfigError: a record has several answers.
    """
    start = time.perf_counter()
    corpus, _ = dataset.subset(limit)
    own = np.arange(len(corpus.paths))
    metrics = _pass(answer, dataset, corpus, batch_size, own)
    control = {}
    if blind and len(corpus.paths) > 1:
        control = _pass(answer, dataset, corpus, batch_size, dataset.other_images())
    return Report(metrics, control, time.perf_counter() - start)


def _pass(
    answer: Answer, dataset: Dataset, corpus: Corpus, batch_size: int, image: np.ndarray
) -> dict[str, float]:
    """Answer every record; ``image`` is the image that is read in place of each."""
    names = [dataset.records[i].id for i in corpus.source.tolist()]
    split = (_split(corpus, i, names[i]) for i in range(len(corpus.first)))
    prompts, expected = zip(*split, strict=True)
    texts = [dataset.tokenizer.decode(ids.tolist()).strip() for ids in expected]
    files = [[corpus.paths[image[i]] for i in images] for images in corpus.images]
    order = _order(corpus.length.tolist(), files)
    right = np.zeros(len(prompts), bool)
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size]
        filled = chosen + [chosen[0]] * (batch_size - len(chosen))
        asked = [prompts[i] for i in filled], [files[i] for i in filled]
        longest = bucket(max(len(expected[i]) for i in filled), 8)  # few lengths are compiled
        said = answer(*asked, corpus.source[filled].tolist(), longest)
        for i, text in zip(chosen, said):
            # The model can't give an answer with a word that is not in the vocabulary.
            known = dataset.tokenizer.unk_id not in expected[i]
            right[i] = known and text.strip() == texts[i]
    kinds = np.asarray([dataset.records[i].tags.get("kind", "") for i in corpus.source.tolist()])
    groups = {f"exact_match/{kind}": kinds == kind for kind in sorted(set(kinds.tolist()) - {""})}
    groups = {"exact_match": np.ones(len(right), bool)} | groups
    metrics = {name: float(right[of].mean()) for name, of in groups.items()}
    return metrics | {"answers": float(len(right))}


def _order(length: Sequence[int], files: Sequence[Sequence[str]]) -> list[int]:
    """The order in which records are answered.

    Those with the same images come together, which are then read once; else those of about one
    length: less padding, and few shapes to compile.
    """
    names = [tuple(of_record) for of_record in files]
    longest: dict[tuple[str, ...], int] = {}
    for name, tokens in zip(names, length, strict=True):
        longest[name] = max(longest.get(name, 0), tokens)
    return sorted(range(len(names)), key=lambda i: (longest[names[i]], names[i], length[i], i))


def _split(corpus: Corpus, i: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A record's tokens before its answer, and those of the answer, its end included."""
    own = slice(corpus.first[i], corpus.last[i])
    tokens, loss = corpus.tokens[own], corpus.loss[own]
    answers = np.flatnonzero(loss)
    if not len(answers) or answers[-1] - answers[0] + 1 != len(answers):
        if not len(answers):
            raise ConfigError(f"record {name} has no answer to compare with; remove it")
        raise ConfigError(
            f"record {name} has {1 + int((np.diff(answers) > 1).sum())} answers; with a compressed "
            "KV cache (kv) a conversation has one, since a second turn on a compressed cache is "
            "not supported: split it, or leave kv out"
        )
    return tokens[: answers[0]], tokens[answers]
