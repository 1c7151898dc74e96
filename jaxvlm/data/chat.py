"""Records -> token ids and where the loss lies: on the assistant's turns, and nowhere else."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int32, Int64

from jaxvlm.data.errors import ImageError, Problem
from jaxvlm.data.formats import PLACEHOLDER, Record, Turn
from jaxvlm.data.spans import Spans
from jaxvlm.data.template import TemplateError
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.types import Span

_Said = tuple[tuple[Turn, ...], tuple[str, ...]]
"""Turns, and what leads in each of their pictures."""
_CHUNK = 4096  # conversations tokenized at once: bounds the memory of their offsets


class Corpus(NamedTuple):
    """Every record's ids, in two flat arrays.

    A picture is *one* image token here and becomes a whole span in a row. Records
    that say the same share one conversation: easy-VQA's 38,575 are 1,093 conversations.
    """

    tokens: Int32[np.ndarray, " total"]
    loss: Bool[np.ndarray, " total"]
    """Whether predicting the token is trained."""
    first: Int64[np.ndarray, " records"]
    """Index in ``tokens`` of a record's first token."""
    last: Int64[np.ndarray, " records"]
    """One after the index of its last token."""
    length: Int32[np.ndarray, " records"]
    """Tokens that the record takes in a row, pictures included."""
    pictures: tuple[tuple[int, ...], ...]
    """Of each record: indices into ``paths``."""
    paths: tuple[str, ...]
    """Each picture file once."""
    spans: tuple[Span, ...]
    """What each picture is in a row."""
    source: Int32[np.ndarray, " records"]
    """Index of each in the list of records that was encoded."""


def texts(records: Sequence[Record]) -> Iterator[str]:
    """What was said, turn by turn: food for :func:`jaxvlm.data.tokenizer.build`."""
    for record in records:
        for turn in record.turns:
            yield turn.content.replace(PLACEHOLDER, " ")


def prompt_ids(
    turns: Sequence[Turn], tokenizer: ChatTokenizer, leads: Sequence[str] = ()
) -> Int32[np.ndarray, " T"]:
    """Ids of a conversation that the assistant is to go on with, a picture being one token.

    Args:
        turns: what was said so far; ``<image>`` stands for a picture.
        tokenizer: gives the template and the ids.
        leads: text that the model sees before each picture; () is none.

    Raises:
        TemplateError: the chat template refuses these turns.
    """
    text = tokenizer.render(turns, add_generation_prompt=True, leads=leads)
    return np.asarray(tokenizer.encode_chat(text), np.int32)


INSTRUCTION = "Represent the user's input."
"""What Qwen3-VL-Embedding is told where nothing else is asked for."""


def to_embed(said: str, instruction: str) -> list[Turn]:
    """The conversation whose last token, behind the assistant's header, stands for ``said``.

    Args:
        said: text; ``<image>`` stands for a picture. Nothing at all becomes ``NULL``.
        instruction: what the vector is for; a full stop is added where no punctuation ends it.

    Source: Qwen3-VL-Embedding, arXiv 2601.04720, and the script published with its weights.
    """
    told = instruction.strip() or INSTRUCTION
    if not unicodedata.category(told[-1]).startswith("P"):
        told += "."
    return [Turn("system", told), Turn("user", said or "NULL")]


def encode(
    records: Sequence[Record], tokenizer: ChatTokenizer, spans: Spans
) -> tuple[Corpus, list[Problem]]:
    """Ids and loss mask of every record.

    Args:
        records: what :func:`jaxvlm.data.formats.read` gave.
        tokenizer: gives the template and the ids.
        spans: what a picture is in a row.

    Returns:
        The records that have ids, in order, and the problems of the others.
    """
    measured, unfit = _measured(records, _by_file(spans, tokenizer.image_id))
    # One rendering and one encoding for each thing said: a cache, so nothing depends on it.
    number: dict[_Said, int] = {}
    said = [
        (r.turns, tuple(measured[path].lead for path in r.images if path in measured))
        for r in records
    ]
    conversation = [number.setdefault(one, len(number)) for one in said]
    ids, loss, reasons = _encode_turns(list(number), tokenizer)
    start = np.concatenate([[0], np.cumsum([len(i) for i in ids], dtype=np.int64)])
    marks = np.asarray([int((i == tokenizer.image_id).sum()) for i in ids], np.int32)

    picture: dict[str, int] = {}
    kept: list[int] = []
    problems: list[Problem] = []
    for i, (record, c) in enumerate(zip(records, conversation)):
        if failed := next((path for path in record.images if path in unfit), None):
            problems.append(Problem(record.id, unfit[failed], failed))
        elif reasons[c][0]:
            problems.append(Problem(record.id, *reasons[c]))
        elif marks[c] != len(record.images):
            detail = f"{marks[c]} picture tokens, {len(record.images)} pictures"
            problems.append(Problem(record.id, "the chat template drops or adds pictures", detail))
        else:
            kept.append(i)
            for path in record.images:
                picture.setdefault(path, len(picture))
    of_picture = tuple(measured[path] for path in picture)
    per_picture = [len(span.ids) for span in of_picture]
    pictures = tuple(tuple(picture[p] for p in records[i].images) for i in kept)
    extra = [sum(per_picture[p] - 1 for p in group) for group in pictures]
    which = np.asarray([conversation[i] for i in kept], np.int64)
    corpus = Corpus(
        tokens=np.concatenate([np.zeros(0, np.int32), *ids]),
        loss=np.concatenate([np.zeros(0, bool), *loss]),
        first=start[which],
        last=start[which + 1],
        length=(start[which + 1] - start[which] + np.asarray(extra, np.int64)).astype(np.int32),
        pictures=pictures,
        paths=tuple(picture),
        spans=of_picture,
        source=np.asarray(kept, np.int32),
    )
    return corpus, problems


def _measured(
    records: Sequence[Record], measure: Callable[[str], Span]
) -> tuple[dict[str, Span], dict[str, str]]:
    """The span of each picture's file, or why it has none."""
    measured: dict[str, Span] = {}
    unfit: dict[str, str] = {}
    for path in dict.fromkeys(path for record in records for path in record.images):
        try:
            measured[path] = measure(path)
        except ImageError as error:
            unfit[path] = str(error)
    return measured, unfit


def _by_file(spans: Spans, image_id: int) -> Callable[[str], Span]:
    """``spans`` as a function of a file; equal ones are one object."""
    of = functools.cache(functools.partial(Span.of, image_id))
    known: dict[tuple[bytes, ...], Span] = {}

    def find(path: str) -> Span:
        found = spans if isinstance(spans, int) else spans(path)
        if isinstance(found, int):
            return of(found)
        name = tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(found))
        return known.setdefault(name, found)

    return find


def _encode_turns(
    conversations: list[_Said], tokenizer: ChatTokenizer
) -> tuple[list[np.ndarray], list[np.ndarray], list[tuple[str, str]]]:
    """Ids, loss mask and (reason, detail) of each; an empty reason is none."""
    ids: list[np.ndarray] = []
    loss: list[np.ndarray] = []
    reasons: list[tuple[str, str]] = []
    forbidden = special_pattern(tokenizer)
    for begin in range(0, len(conversations), _CHUNK):
        rendered, spans = [], []
        for turns, leads in conversations[begin : begin + _CHUNK]:
            render = functools.partial(tokenizer.render, leads=leads)
            text, where, reason = _render(turns, tokenizer, forbidden, render)
            rendered.append(text)
            spans.append(where)
            reasons.append(reason)
        for encoding, where in zip(tokenizer.encode_chats(rendered), spans):
            tokens = np.asarray(encoding.ids, np.int32)
            ids.append(tokens)
            loss.append(_mask(tokens, encoding.offsets, where, tokenizer.image_id))
    return ids, loss, reasons


def special_pattern(tokenizer: ChatTokenizer) -> re.Pattern[str]:
    """Matches special tokens that a record's text must not hold: they would forge a turn."""
    names = sorted(tokenizer.special_tokens - {PLACEHOLDER}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _render(
    turns: tuple[Turn, ...],
    tokenizer: ChatTokenizer,
    forbidden: re.Pattern[str],
    render: Callable[..., str],
) -> tuple[str, list[tuple[int, int]], tuple[str, str]]:
    """The text, the assistant's spans in it, and why it can't be used ("" if it can)."""
    for turn in turns:
        if found := forbidden.search(turn.content):
            return "", [], ("the text holds a special token", found.group())
    try:
        text = render(turns)
        spans = []
        for i, turn in enumerate(turns):
            if turn.role == "assistant":
                head = render(turns[:i], add_generation_prompt=True)
                end = _turn_end(turns, i, text, tokenizer, render)
                if not text.startswith(head) or end < len(head):
                    return "", [], ("the chat template rewrites earlier turns", f"turn {i}")
                spans.append((len(head), end))
    except TemplateError as error:
        return "", [], ("the chat template refuses it", str(error))
    return text, spans, ("", "")


def _turn_end(
    turns: tuple[Turn, ...],
    i: int,
    text: str,
    tokenizer: ChatTokenizer,
    render: Callable[..., str],
) -> int:
    """Where answer ``i`` ends in ``text``: after its end-of-turn token; -1 if that is not clear.

    A line break after that token is left out: generation has stopped by then, so predicting it
    would train what is never said.
    """
    whole = render(turns[: i + 1]) if i + 1 < len(turns) else text
    if text.startswith(whole):
        trimmed = whole.rstrip()
        return len(trimmed) if trimmed.endswith(tuple(tokenizer.special_tokens)) else len(whole)
    # Qwen3 writes a thought into the last answer alone, so that the conversation up to here
    # reads otherwise. A mark behind the answer then shows where it ends.
    marked = turns[i]._replace(content=turns[i].content + "\u2063")
    other = render((*turns[:i], marked, *turns[i + 1 :]))
    end = next((at for at, (a, b) in enumerate(zip(text, other)) if a != b), len(text))
    for stop in tokenizer.stop_ids:
        token = tokenizer.backend.id_to_token(stop)
        if token and text.startswith(token, end):
            return end + len(token)
    return -1


def _mask(
    ids: np.ndarray, offsets: list[tuple[int, int]], spans: list[tuple[int, int]], image_id: int
) -> np.ndarray:
    """bool[T]: tokens that overlap an assistant's span."""
    mask = np.zeros(len(ids), bool)
    if len(ids):
        begin, end = np.asarray(offsets, np.int64).T
        for first, last in spans:
            mask |= (begin < last) & (end > first)
        mask &= ids != image_id
        mask[0] = False  # nothing stands before it that could predict it
    return mask
