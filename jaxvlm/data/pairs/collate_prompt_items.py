"""Collate items into prompts of a VLM whose last token's hidden state is the embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from jaxvlm.data import image_placeholders
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.collate import PromptShape, collate_prompts
from jaxvlm.data.errors import ImageError
from jaxvlm.data.image_placeholders import Lead
from jaxvlm.data.images.image_files import ImageFormat, Preparation
from jaxvlm.data.images.patches import Patching
from jaxvlm.data.pairs.collate_items import (
    TOKENIZE_BATCH,
    Encoded,
    Rejected,
    TokenIds,
    encoded,
)
from jaxvlm.data.pairs.examples import Item
from jaxvlm.data.sources.conversation_formats import PLACEHOLDER
from jaxvlm.data.tokenizer.chat_template import TemplateError
from jaxvlm.data.tokenizer.chat_tokenizer import ChatTokenizer
from jaxvlm.types import Batch, Span

_MARK = "\u2063"  # invisible, and occurs in no template


class PromptCollator(NamedTuple):
    """Collator of a VLM whose last token's hidden state is the embedding: each item is a prompt.

    Prompts are the same as those of :meth:`jaxvlm.inference.vlm.VLM.embed`.
    """

    tokenizer: ChatTokenizer
    image_format: ImageFormat
    visual_mask: str = "causal"
    """See ``DecoderConfig``."""
    padding: str = "left"
    """Side on which prompts are padded: left | right."""

    @property
    def prepare(self) -> Preparation | None:
        """See :class:`Collator`."""
        return self.image_format.prepare

    @property
    def image(self) -> tuple[int, Patching | None, int]:
        """See :class:`Collator`."""
        return self.image_format.size, self.image_format.patching, 0

    @property
    def span_of(self) -> Callable[[str], Span]:
        """See :class:`Collator`."""
        return self.image_format.of_file

    @property
    def unk_id(self) -> int:
        """See :class:`Collator`."""
        return self.tokenizer.unk_id

    @property
    def lengths(self) -> tuple[int, int]:
        """See :class:`Collator`."""
        return 0, 0

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`Collator`."""
        return {
            "rows": f"prompt, padded {self.padding}, {self.visual_mask}",
            "images": self.image_format.prepare.fingerprint,
        }

    def encode(self, items: Sequence[Item], max_length: int) -> tuple[Encoded, Rejected]:
        """See :class:`Collator`. Long prompts lose the end of the text, never an image."""
        measured, rejected = self._measure_spans(items)
        ids = TokenIds(len(items))
        ends: dict[tuple, int] = {}
        truncated = 0
        good = [i for i in range(len(items)) if i not in rejected]
        for begin in range(0, len(good), TOKENIZE_BATCH):
            batch = good[begin : begin + TOKENIZE_BATCH]
            leads = [
                [Lead.of(span)] if (span := measured.get(items[i].image)) else [] for i in batch
            ]
            prompts = [
                rendered(self.tokenizer, items[i].text, items[i].instruction, own, ends)
                for i, own in zip(batch, leads, strict=True)
            ]
            encodings = self.tokenizer.encode_chats([prompt.text for prompt in prompts])
            for i, prompt, encoding in zip(batch, prompts, encodings, strict=True):
                tokens = np.asarray(encoding.ids, np.int32)
                span = measured.get(items[i].image)
                extra = len(span.ids) - 1 if span else 0
                over = len(tokens) + extra - max_length
                if prompt.reason:
                    rejected[i] = prompt.reason, prompt.text
                elif int((tokens == self.tokenizer.image_id).sum()) != bool(span):
                    rejected[i] = "the chat template drops or adds images", items[i].image
                elif over > 0:
                    tokens = prompt.shortened(encoding, over, self.tokenizer.image_id)
                    truncated += len(tokens) + extra <= max_length
                    if len(tokens) + extra > max_length:
                        detail = f"{len(tokens) + extra} of {max_length} tokens without its text"
                        rejected[i] = "longer than the maximum length", detail
                if i not in rejected:
                    ids.add(i, tokens)
        return encoded(items, ids, rejected, measured, truncated), rejected

    def collate(self, items: Encoded, which: Sequence[int], shape: PromptShape) -> Batch:
        """See :class:`Collator`."""
        image_id = self.tokenizer.image_id

        def prompt(i: int) -> image_placeholders.Expanded:
            own = [items.spans[items.image[i]]] if items.image[i] >= 0 else []
            return image_placeholders.expand(items.ids(i), image_id, own, shape.taps)

        return collate_prompts(
            [prompt(i) if i >= 0 else None for i in which],
            shape,
            pad_id=self.tokenizer.pad_id,
            mask=self.visual_mask,
            padding=self.padding,
        )

    def _measure_spans(self, items: Sequence[Item]) -> tuple[dict[str, Span], Rejected]:
        """Compute each image's token span, and reject items that no prompt can be rendered of."""
        measured: dict[str, Span] = {}
        rejected: Rejected = {}
        special = tokenize.special_pattern(self.tokenizer)
        for i, item in enumerate(items):
            try:
                if item.image and item.image not in measured:
                    measured[item.image] = self.image_format.of_file(item.image)
            except ImageError as error:
                rejected[i] = str(error), item.image
            match = special.search(item.text) or special.search(item.instruction)
            if match or PLACEHOLDER in item.instruction:
                detail = match.group() if match else PLACEHOLDER
                rejected[i] = "the text contains a special token", detail
        return measured, rejected


class Prompt(NamedTuple):
    """A rendered prompt, and where its own text is."""

    text: str
    begin: int
    """Character offset of the item's own text, after its images."""
    end: int
    """Character offset of the end of the item's own text."""
    reason: str = ""
    """Why the item can't be used; ``text`` is then the detail. "" if it can."""

    def shortened(self, encoding: tokenizers.Encoding, over: int, image_id: int) -> np.ndarray:
        """Drop tokens from the end of the own text; those of the template and images are kept.

        Args:
            encoding: the tokenized prompt.
            over: number of tokens to drop, at least 1.
            image_id: id of an image's token.

        Returns:
            i32[T] token ids, more than wanted if the own text has fewer than ``over``.
        """
        tokens = np.asarray(encoding.ids, np.int32)
        begin, end = np.asarray(encoding.offsets, np.int64).T
        inside = (begin >= self.begin) & (end <= self.end) & (end > begin)
        return np.delete(tokens, np.flatnonzero(inside & (tokens != image_id))[-over:])


def rendered(
    tokenizer: ChatTokenizer,
    text: str,
    instruction: str,
    leads: Sequence[Lead],
    ends: dict[tuple, int],
) -> Prompt:
    """Render an item's prompt.

    Args:
        tokenizer: tokenizer with the chat template.
        text: text of the item; ``<image>`` stands for an image.
        instruction: see :func:`jaxvlm.data.conversations.tokenize.to_embed`.
        leads: what is written around each image.
        ends: cache of the length of what follows the item's text.
    """

    def render(content: str) -> str:
        turns = tokenize.to_embed(content, instruction)
        return tokenizer.render(turns, add_generation_prompt=True, leads=leads)

    try:
        whole, key = render(text), (instruction, *leads)
        if key not in ends:  # it does not depend on the item's text
            ends[key] = len(render(text + _MARK).rpartition(_MARK)[2])
    except TemplateError as error:
        return Prompt(str(error), 0, 0, "the chat template rejects the conversation")
    end = len(whole) - ends[key]
    return Prompt(whole, end - len(text.rpartition(PLACEHOLDER)[2]), end)
