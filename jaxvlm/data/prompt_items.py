"""Items -> rows of a VLM whose last token's state is the vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxvlm.data import chat, spans
from jaxvlm.data.errors import ImageError
from jaxvlm.data.examples import Item
from jaxvlm.data.formats import PLACEHOLDER
from jaxvlm.data.images import PictureFormat, Preparation
from jaxvlm.data.item_rows import CHUNK, Bad, Encoded, encoded
from jaxvlm.data.patches import Patching
from jaxvlm.data.prompt_rows import PromptShape, lay_prompts
from jaxvlm.data.template import TemplateError
from jaxvlm.data.tokenizer import ChatTokenizer
from jaxvlm.types import Batch, Span

_MARK = "\u2063"  # invisible, and in no template


class PromptRows(NamedTuple):
    """Rows of a VLM whose last token's state is the vector: each item a prompt.

    As :meth:`jaxvlm.build.loaded.Loaded.embed` makes them.
    """

    tokenizer: ChatTokenizer
    pictures: PictureFormat
    visual_mask: str = "causal"
    """See ``DecoderConfig``."""
    padding: str = "left"
    """left | right."""

    @property
    def prepare(self) -> Preparation | None:
        """See :class:`RowFormat`."""
        return self.pictures.prepare

    @property
    def picture(self) -> tuple[int, Patching | None, int]:
        """See :class:`RowFormat`."""
        return self.pictures.size, self.pictures.patching, 0

    @property
    def lengths(self) -> tuple[int, int]:
        """See :class:`RowFormat`."""
        return 0, 0

    def fingerprint(self) -> dict[str, Any]:
        """See :class:`RowFormat`."""
        return {
            "rows": f"prompt, padded {self.padding}, {self.visual_mask}",
            "pictures": self.pictures.prepare.fingerprint,
        }

    def encode(self, items: Sequence[Item], max_length: int) -> tuple[Encoded, Bad]:
        """See :class:`RowFormat`. Of what is too long, the text's end is cut, never a picture."""
        measured, bad = self._measured(items)
        ids: dict[int, np.ndarray] = {}
        ends: dict[tuple, int] = {}
        cut = 0
        good = [i for i in range(len(items)) if i not in bad]
        for begin in range(0, len(good), CHUNK):
            chunk = good[begin : begin + CHUNK]
            prompts = [self._prompt(items[i], measured.get(items[i].image), ends) for i in chunk]
            found = self.tokenizer.encode_chats([prompt.text for prompt in prompts])
            for i, prompt, encoding in zip(chunk, prompts, found, strict=True):
                row = np.asarray(encoding.ids, np.int32)
                span = measured.get(items[i].image)
                extra = len(span.ids) - 1 if span else 0
                over = len(row) + extra - max_length
                if prompt.reason:
                    bad[i] = prompt.reason, prompt.text
                elif int((row == self.tokenizer.image_id).sum()) != bool(span):
                    bad[i] = "the chat template drops or adds pictures", items[i].image
                elif over > 0:
                    inside = prompt.inside(encoding.offsets) & (row != self.tokenizer.image_id)
                    row = np.delete(row, np.flatnonzero(inside)[-over:])
                    cut += len(row) + extra <= max_length
                    if len(row) + extra > max_length:
                        detail = f"{len(row) + extra} of {max_length} tokens, its text cut"
                        bad[i] = "longer than the longest row", detail
                if i not in bad:
                    ids[i] = row
        return encoded(items, ids, bad, measured, cut), bad

    def lay(self, items: Encoded, which: Sequence[int], shape: PromptShape) -> Batch:
        """See :class:`RowFormat`."""
        rows: list[spans.Expanded | None] = []
        for i in which:
            if i < 0:
                rows.append(None)
                continue
            own = [items.spans[items.picture[i]]] if items.picture[i] >= 0 else []
            rows.append(spans.expand(items.ids(i), self.tokenizer.image_id, own, shape.taps))
        return lay_prompts(
            rows,
            shape,
            pad_id=self.tokenizer.pad_id,
            mask=self.visual_mask,
            padding=self.padding,
        )

    def _measured(self, items: Sequence[Item]) -> tuple[dict[str, Span], Bad]:
        """Each picture's span, and what is wrong with items before they are written as prompts."""
        measured: dict[str, Span] = {}
        bad: Bad = {}
        forged = chat.special_pattern(self.tokenizer)
        for i, item in enumerate(items):
            try:
                if item.image and item.image not in measured:
                    measured[item.image] = self.pictures.of_file(item.image)
            except ImageError as error:
                bad[i] = str(error), item.image
            found = forged.search(item.text) or forged.search(item.instruction)
            if found or PLACEHOLDER in item.instruction:
                bad[i] = "the text holds a special token", found.group() if found else PLACEHOLDER
        return measured, bad

    def _prompt(self, item: Item, span: Span | None, ends: dict[tuple, int]) -> _Prompt:
        """An item's prompt; ``ends`` keeps how long is what follows items."""
        leads = [span.lead] if span else []

        def render(said: str) -> str:
            turns = chat.to_embed(said, item.instruction)
            return self.tokenizer.render(turns, add_generation_prompt=True, leads=leads)

        try:
            text, how = render(item.text), (item.instruction, *leads)
            if how not in ends:  # it is the same whatever the item says
                ends[how] = len(render(item.text + _MARK).rpartition(_MARK)[2])
        except TemplateError as error:
            return _Prompt(str(error), 0, 0, "the chat template refuses it")
        end = len(text) - ends[how]
        return _Prompt(text, end - len(item.text.rpartition(PLACEHOLDER)[2]), end)


class _Prompt(NamedTuple):
    text: str
    begin: int
    """Where the item's own text begins, behind its picture ..."""
    end: int
    """... and ends."""
    reason: str = ""
    """Why it can't be used; ``text`` is the detail then."""

    def inside(self, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
        """Which tokens are the item's own text, and nothing else."""
        begin, end = np.asarray(offsets, np.int64).T
        return (begin >= self.begin) & (end <= self.end) & (end > begin)
