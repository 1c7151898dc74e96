"""Tokenize records to a corpus; the loss mask covers the assistant's turns and nothing else."""

from __future__ import annotations

import array
import functools
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import tokenizers
from jaxtyping import Bool, Int32, Int64

from jaxvlm.config import check_choice
from jaxvlm.data.errors import ImageError, Problem
from jaxvlm.data.image_placeholders import ImageSpans, Lead
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER, Record, Turn, record_spool
from jaxvlm.data.sources.member_names import digest_of, is_video, shown
from jaxvlm.data.tokenizer.chat_template import TemplateError
from jaxvlm.data.tokenizer.chat_tokenizer import ONE_AT_A_TIME, ChatTokenizer
from jaxvlm.types import Span

_Conversation = tuple[tuple[Turn, ...], tuple[Lead, ...]]
"""Turns, and what is written around each of their images."""
ALL, LAST, EACH = "all", "last", "each"
"""Values of ``data.loss_turns``: the answers of a conversation that are trained."""
_TOKENIZE_BATCH = 4096  # conversations tokenized at once: bounds the memory of their offsets


class Corpus(NamedTuple):
    """Token ids and loss mask of all records, in two flat arrays.

    An image is *one* image token here and is expanded to its span of tokens in a packed sequence.
    Records with equal turns share one conversation: easy-VQA's 38,575 are 1,093 conversations.
    """

    tokens: Int32[np.ndarray, " total"]
    loss: Bool[np.ndarray, " total"]
    """Whether the loss covers the prediction of the token."""
    first: Int64[np.ndarray, " records"]
    """Index in ``tokens`` of a record's first token."""
    last: Int64[np.ndarray, " records"]
    """Index of the record's last token, plus one."""
    length: Int32[np.ndarray, " records"]
    """Tokens that the record takes in a packed sequence, those of images included."""
    images: Sequence[tuple[int, ...]]
    """For each record: indices into ``paths``."""
    paths: Sequence[str]
    """Each image file once."""
    spans: Sequence[Span]
    """The token span of each image."""
    source: Int32[np.ndarray, " records"]
    """Index of each record in the list that was tokenized."""


def texts(records: Iterable[Record]) -> Iterator[str]:
    """Yield the text of each turn: input of :func:`jaxvlm.data.tokenizer.chat_tokenizer.build`."""
    for record in records:
        for turn in record.turns:
            yield turn.content.replace(PLACEHOLDER, " ")
            yield from filter(None, (turn.calls, turn.tools))


def prompt_ids(
    turns: Sequence[Turn], tokenizer: ChatTokenizer, leads: Sequence[Lead] = ()
) -> Int32[np.ndarray, " T"]:
    """Tokenize a conversation with a generation prompt; each image is one token.

    Args:
        turns: the turns so far; ``<image>`` stands for an image.
        tokenizer: tokenizer with a chat template.
        leads: what is written around each image; () is nothing.

    Returns:
        i32[T] token ids.

    Raises:
        TemplateError: the chat template refuses these turns.
    """
    try:
        text = tokenizer.render(turns, add_generation_prompt=True, leads=leads)
    except TemplateError as error:
        raise TemplateError(f"the chat template rejects the conversation: {error}") from None
    return np.asarray(tokenizer.encode_chat(text), np.int32)


INSTRUCTION = "Represent the user's input."
"""Default instruction of Qwen3-VL-Embedding."""


def to_embed(text: str, instruction: str) -> list[Turn]:
    """Build the conversation whose last token, after the assistant's header, embeds ``text``.

    Args:
        text: ``<image>`` stands for an image. An empty text becomes ``NULL``.
        instruction: task of the embedding; "" is :data:`INSTRUCTION`. A full stop is added if it
            does not end with punctuation.

    Source: Qwen3-VL-Embedding, arXiv 2601.04720, and the script published with its weights.
    """
    system = instruction.strip() or INSTRUCTION
    if not unicodedata.category(system[-1]).startswith("P"):
        system += "."
    return [Turn("system", system), Turn("user", text or "NULL")]


def split_turns(records: Sequence[Record], loss_turns: str) -> Sequence[Record]:
    """Return the records that ``data.loss_turns`` makes of conversations.

    A chat template may write an answer otherwise once another turn follows (without its thinking),
    so what a model reads and says at each turn is exact only if the conversation ends there.

    Args:
        records: conversations.
        loss_turns: ``all`` returns them as they are; ``last`` cuts each behind its last trained
            answer and trains that alone; ``each`` makes a record of each trained answer, with the
            turns before it, and appends the answer's number to the id of all but the first.

    Raises:
        ConfigError: ``loss_turns`` is none of these.
    """
    check_choice("data.loss_turns", loss_turns, (ALL, LAST, EACH))
    if loss_turns == ALL:
        return records
    chosen = record_spool()
    for record in records:
        ends = [
            i for i, turn in enumerate(record.turns) if turn.role == "assistant" and turn.trained
        ]
        if loss_turns == LAST:
            chosen.add(_until(record, ends[-1]))
            continue
        parts = [_until(record, end) for end in ends]
        names = [record.id, *(f"{record.id}#{n + 2}" for n in range(len(parts) - 1))]
        for part, name in zip(parts, names, strict=True):
            chosen.add(part._replace(id=name))
    return chosen.items()


def _until(record: Record, last: int) -> Record:
    """Cut a record behind an answer, which alone is trained; its images are of the turns left."""
    before = (
        t._replace(trained=False) if t.role == "assistant" else t for t in record.turns[:last]
    )
    turns = (*before, record.turns[last])
    images = sum(turn.content.count(PLACEHOLDER) for turn in turns)
    return record._replace(turns=turns, images=record.images[:images])


def encode(
    records: Sequence[Record], tokenizer: ChatTokenizer, spans: ImageSpans
) -> tuple[Corpus, list[Problem]]:
    """Tokenize records and compute their loss masks.

    Args:
        records: records from :func:`jaxvlm.data.sources.conversation_formats.read`.
        tokenizer: tokenizer with a chat template.
        spans: the token span of an image.

    Returns:
        The records that could be tokenized, in order, and the problems of the others.
    """
    measured, unfit = _measure_spans(records, _by_file(spans, tokenizer.image_id))
    # Equal conversations are rendered and tokenized once: a cache, so no result depends on it.
    number: dict[bytes, int] = {}
    conversation, encoded = array.array("q"), _Encoded(tokenizer)
    for record in records:
        leads = tuple(Lead.of(measured[path]) for path in record.images if path in measured)
        one = record.turns, leads
        digest = digest_of(repr(one).encode())
        if digest not in number:
            number[digest] = len(number)
            encoded.add(one)
        conversation.append(number[digest])
    encoded.finish()
    start, marks, reasons = np.asarray(encoded.start), encoded.marks, encoded.reasons

    image: dict[str, int] = {}
    good: list[int] = []
    images: list[tuple[int, ...]] = []
    problems: list[Problem] = []
    for i, (record, c) in enumerate(zip(records, conversation)):
        if failed := next((path for path in record.images if path in unfit), None):
            problems.append(Problem(record.id, unfit[failed], shown(failed)))
        elif reasons[c][0]:
            problems.append(Problem(record.id, *reasons[c]))
        elif marks[c] != len(record.images):
            detail = f"{marks[c]} image tokens, {len(record.images)} images"
            problems.append(Problem(record.id, "the chat template drops or adds images", detail))
        else:
            good.append(i)
            images.append(tuple(image.setdefault(path, len(image)) for path in record.images))
    of_image = tuple(measured[path] for path in image)
    per_image = [len(span.ids) for span in of_image]
    extra = [sum(per_image[p] - 1 for p in group) for group in images]
    which = np.asarray(conversation, np.int64)[good]
    corpus = Corpus(
        tokens=np.concatenate([np.zeros(0, np.int32), *encoded.ids]),
        loss=np.concatenate([np.zeros(0, bool), *encoded.loss]),
        first=start[which],
        last=start[which + 1],
        length=(start[which + 1] - start[which] + np.asarray(extra, np.int64)).astype(np.int32),
        images=tuple(images),
        paths=tuple(image),
        spans=of_image,
        source=np.asarray(good, np.int32),
    )
    return corpus, problems


def _measure_spans(
    records: Sequence[Record], measure: Callable[[str], Span]
) -> tuple[dict[str, Span], dict[str, str]]:
    """Compute the span of each image file, or the reason why it has none."""
    measured: dict[str, Span] = {}
    unfit: dict[str, str] = {}
    for path in dict.fromkeys(path for record in records for path in record.images):
        try:
            measured[path] = measure(path)
        except ImageError as error:
            unfit[path] = str(error)
    return measured, unfit


def _by_file(spans: ImageSpans, image_id: int) -> Callable[[str], Span]:
    """Turn ``spans`` into a function of a file; equal spans become one object."""
    of = functools.cache(functools.partial(Span.of, image_id))
    unique: dict[tuple[bytes, ...], Span] = {}

    def measure(path: str) -> Span:
        if isinstance(spans, int) and is_video(path):
            raise ImageError("a video, whose tokens a recipe says (--config)")
        span = spans if isinstance(spans, int) else spans(path)
        if isinstance(span, int):
            return of(span)
        name = tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(span))
        return unique.setdefault(name, span)

    return measure


class _Encoded:
    """Conversations, tokenized some at a time.

    Attributes:
        ids: token ids, in parts.
        loss: loss masks, in the same parts.
        start: where each conversation begins in the parts together, and their end.
        marks: image tokens of each.
        reasons: (reason, detail) of each; an empty reason is none.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer, self._forbidden = tokenizer, special_pattern(tokenizer)
        self._waiting: list[_Conversation] = []
        self.ids: list[np.ndarray] = []
        self.loss: list[np.ndarray] = []
        self.start, self.marks = array.array("q", [0]), array.array("q")
        self.reasons: list[tuple[str, str]] = []

    def add(self, conversation: _Conversation) -> None:
        self._waiting.append(conversation)
        if len(self._waiting) == _TOKENIZE_BATCH:
            self.finish()

    def finish(self) -> None:
        """Tokenize those that wait."""
        tokenizer, rendered, spans, reasons = self._tokenizer, [], [], []
        for turns, leads in self._waiting:
            # An earlier answer that is not trained may be written without its thinking.
            forgets = not any(turn.trained for turn in turns[:-1] if turn.role == "assistant")
            render = functools.partial(tokenizer.render, leads=leads, forgets=forgets)
            text, where, reason = _render(turns, tokenizer, self._forbidden, render)
            rendered.append(text)
            spans.append(where)
            reasons.append(reason)
        ids, loss = [np.zeros(0, np.int32)], [np.zeros(0, bool)]
        for c, encoding in enumerate(tokenizer.encode_chats(rendered)):
            tokens = np.asarray(encoding.ids, np.int32)
            ids.append(tokens)
            loss.append(_mask(tokens, encoding.offsets, spans[c], tokenizer))
            if joined := _joined(encoding, rendered[c], spans[c], tokenizer):
                reasons[c] = (_JOINED, joined)
            self.start.append(self.start[-1] + len(tokens))
            self.marks.append(int((tokens == tokenizer.image_id).sum()))
        self.ids.append(np.concatenate(ids))
        self.loss.append(np.concatenate(loss))
        self.reasons += reasons
        self._waiting = []


def special_pattern(tokenizer: ChatTokenizer) -> re.Pattern[str]:
    """Compile a pattern of the tokens that a record's text must not contain."""
    names = sorted(tokenizer.reserved_tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names)) or r"(?!)")


def _render(
    turns: tuple[Turn, ...],
    tokenizer: ChatTokenizer,
    forbidden: re.Pattern[str],
    render: Callable[..., str],
) -> tuple[str, list[tuple[int, int]], tuple[str, str]]:
    """Render turns: the text, the assistant's spans in it, and (reason, detail) if unusable."""
    for turn in turns:
        for part in (turn.content, turn.calls, turn.tools):
            if found := forbidden.search(part):
                return "", [], ("the text contains a special token", found.group())
    try:
        text = render(turns)
        spans = []
        for i, turn in enumerate(turns):
            if turn.role == "assistant" and turn.trained:
                head = render(turns[:i], add_generation_prompt=True)
                end = _turn_end(turns, i, text, tokenizer, render)
                if not text.startswith(head) or end < len(head):
                    return "", [], ("the chat template rewrites earlier turns", _one(turns, i))
                spans.append((len(head), end))
    except TemplateError as error:
        return "", [], ("the chat template rejects the conversation", str(error))
    return text, spans, ("", "")


def _one(turns: Sequence[Turn], i: int) -> str:
    """Turn ``i`` by its number, and where several are trained, how to train one at a time."""
    several = sum(turn.role == "assistant" and turn.trained for turn in turns) > 1
    return f"turn {i}" + (f"; {ONE_AT_A_TIME}" if several else "")


def _turn_end(
    turns: tuple[Turn, ...],
    i: int,
    text: str,
    tokenizer: ChatTokenizer,
    render: Callable[..., str],
) -> int:
    """Find where answer ``i`` ends in ``text``: at or after its end token; -1 if ambiguous."""
    whole = render(turns[: i + 1]) if i + 1 < len(turns) else text
    if text.startswith(whole):
        return len(whole)
    # Qwen3 writes a thinking block into the last answer only, so the conversation up to this turn
    # renders differently. A marker appended to the answer then shows where it ends.
    marked = turns[i]._replace(content=turns[i].content + "\u2063")
    other = render((*turns[:i], marked, *turns[i + 1 :]))
    end = next((at for at, (a, b) in enumerate(zip(text, other)) if a != b), len(text))
    space = len(text[end:]) - len(text[end:].lstrip())
    for stop in tokenizer.stop_ids:
        token = tokenizer.backend.id_to_token(stop)
        if token and text.startswith(token, end + space):
            return end + space + len(token)
    return -1


def _mask(
    ids: np.ndarray,
    offsets: list[tuple[int, int]],
    spans: list[tuple[int, int]],
    tokenizer: ChatTokenizer,
) -> np.ndarray:
    """bool[T]: tokens that overlap a span of the assistant, to the first stop token of each.

    Generation ends at that token, so what the template writes after it (a line break, text) is
    never generated: it is neither trained nor compared.
    """
    mask = np.zeros(len(ids), bool)
    if len(ids):
        begin, end = np.asarray(offsets, np.int64).T
        stop = np.isin(ids, tokenizer.stop_ids)
        for first, last in spans:
            answer = np.flatnonzero((begin < last) & (end > first))
            stops = np.flatnonzero(stop[answer])
            mask[answer[: stops[0] + 1] if len(stops) else answer] = True
        mask &= ids != tokenizer.image_id
        mask[0] = False  # no preceding token could predict it
    return mask


_JOINED = (
    "an answer's first token also holds what precedes it, so generate could not write it; remove "
    "the white space at the answer's beginning, or at the end of the chat template's header"
)


def _joined(
    encoding: tokenizers.Encoding,
    text: str,
    spans: list[tuple[int, int]],
    tokenizer: ChatTokenizer,
) -> str:
    """What stands around an answer whose first token also holds the end of its header, or "".

    Generation begins behind the header's own tokens, so that no such token can be generated.
    """
    if not spans:
        return ""
    begin, end = np.asarray(encoding.offsets, np.int64).reshape(-1, 2).T
    for first, _ in spans:
        # Offsets may leave out white space, so only a boundary that they show is certain.
        if not first or ((end == first).any() and not ((begin < first) & (end > first)).any()):
            continue
        head = tokenizer.encode_chat(text[:first])
        if encoding.ids[: len(head)] != head:
            return repr(text[max(0, first - 12) : first + 12])
    return ""


def take(corpus: Corpus, chosen: np.ndarray) -> Corpus:
    """Select some records of a corpus."""
    return corpus._replace(
        first=corpus.first[chosen],
        last=corpus.last[chosen],
        length=corpus.length[chosen],
        images=tuple(corpus.images[i] for i in chosen.tolist()),
        source=corpus.source[chosen],
    )


def with_readable_images(
    corpus: Corpus, records: Sequence[Record], max_pixels: int
) -> tuple[Corpus, list[Problem]]:
    """Select records whose image headers can be read; also returns the problems of the others."""
    reasons = {
        i: reason
        for i, path in enumerate(corpus.paths)
        if not is_video(path)  # whose tokens were counted by reading it
        and (reason := image_files.check(path, max_pixels)) is not None
    }
    if not reasons:
        return corpus, []
    good, problems = [], []
    for i, images in enumerate(corpus.images):
        bad = next((p for p in images if p in reasons), None)
        if bad is None:
            good.append(i)
        else:
            record = records[int(corpus.source[i])]
            problems.append(Problem(record.id, reasons[bad], shown(corpus.paths[bad])))
    return take(corpus, np.asarray(good, np.int64)), problems


def digest(corpus: Corpus) -> str:
    """Hash token ids, loss masks, and the images' file names and sizes (not their folder)."""
    out = hashlib.blake2b(digest_size=8)
    for values in (corpus.tokens, corpus.loss, corpus.first, corpus.last):
        out.update(np.ascontiguousarray(values).data)
    used = sorted({p for images in corpus.images for p in images})
    digests: dict[int, bytes] = {}  # images of the same size share a span
    for span in (corpus.spans[i] for i in used):
        parts = [span.ids, span.tile, span.positions, np.int64(span.advance)]
        parts += [] if span.sources is None else [span.sources.feature]
        out.update(digests.setdefault(id(span), b"".join(part.tobytes() for part in parts)))
    names = [image_files.name_and_size(corpus.paths[i]) for i in used]
    out.update(repr((corpus.images, names)).encode())
    return out.hexdigest()
