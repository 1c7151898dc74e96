"""Tokenize texts for a text encoder, and pad them to batches."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers

from jaxvlm.data.errors import DataError
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.types import TextStyle

log = logging.getLogger(__name__)
_LENGTH_STEP = 16
"""Texts are padded to a multiple of this length, so that few shapes are compiled."""


class TextTokenizer:
    """A tokenizer that adds its special tokens to a text.

    Args:
        backend: tokenizer of the `tokenizers` library; its own truncation and padding are
            replaced.
        style: maximum length and padding of texts.
        pad_id: id of the padding token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, style: TextStyle, pad_id: int):
        backend.no_padding()
        backend.enable_truncation(style.max_length)
        self.backend, self.style, self.pad_id = backend, style, pad_id
        unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "")
        self.unk_id: int = -1 if unknown is None else unknown
        """-1 if the tokenizer has no unknown token."""

    def encode(self, texts: Sequence[str], max_length: int = 0) -> list[list[int]]:
        """Tokenize texts; those that are too long are truncated, and counted in the log.

        Args:
            texts: texts to tokenize.
            max_length: maximum number of tokens of a text, at most the style's; 0 is the style's.
        """
        length = min(max_length or self.style.max_length, self.style.max_length)
        ids, cut = self.encode_within(texts, length)
        if cut:
            log.warning(
                "%d of %d texts are longer than %d tokens and were truncated",
                cut,
                len(texts),
                length,
            )
        return ids

    def encode_within(self, texts: Sequence[str], length: int) -> tuple[list[list[int]], int]:
        """Tokenize texts to at most ``length`` tokens each.

        Args:
            texts: texts to tokenize.
            length: maximum number of tokens, special tokens included; at most the style's.

        Returns:
            The ids of each text, and the number of texts that were truncated.

        Raises:
            DataError: ``length`` leaves no room for text next to the special tokens.
        """
        if length <= (special := self.backend.num_special_tokens_to_add(False)):
            raise DataError(
                f"a length of {length} tokens leaves no room for text next to {special} special"
                f" tokens; allow {special + 1} or more"
            )
        self.backend.enable_truncation(length)
        encodings = self.backend.encode_batch([self.style.clean(text) for text in texts])
        return [e.ids for e in encodings], sum(bool(e.overflowing) for e in encodings)

    def length(self, ids: Sequence[Sequence[int]]) -> int:
        """Choose the padded length of these texts: one of a few."""
        longest = self.style.max_length if self.style.see_padding else max(map(len, ids))
        return min(self.style.max_length, -(-max(longest, 1) // _LENGTH_STEP) * _LENGTH_STEP)

    def pad(
        self, ids: Sequence[Sequence[int]], count: int, length: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Pad texts on the right to a batch.

        Args:
            ids: token ids of each text.
            count: batch size; rows after the texts hold one padding token that is attended to.
            length: T, padded length; 0 takes that of :meth:`length`.

        Returns:
            i32[count, T] tokens, and i32[count, T] segments: 1 where a token is attended to.
        """
        tokens = np.full((count, length or self.length(ids)), self.pad_id, np.int32)
        segment = np.full(tokens.shape, int(self.style.see_padding), np.int32)
        segment[:, 0] = 1
        for row, text in enumerate(ids):
            tokens[row, : len(text)], segment[row, : len(text)] = text, 1
        return tokens, segment

    def save(self, folder: pathlib.Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for :func:`load`."""
        folder.mkdir(parents=True, exist_ok=True)
        # Not by its own save, whose errors do not say what the system refused.
        text = self.backend.to_str(pretty=True)
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        named = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.style.max_length,
            "pad_token": self.backend.id_to_token(self.pad_id),
        }
        text = json.dumps(named, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load(folder: pathlib.Path, style: TextStyle) -> TextTokenizer:
    """Load the tokenizer of a text encoder's folder.

    Args:
        folder: holds ``tokenizer.json``.
        style: maximum length and padding of texts in the model's family.

    Raises:
        DataError: a file is missing or damaged, or no padding token is named.
    """
    backend, _, special = chat_tokenizer.read(folder)
    pad = backend.token_to_id(special.get("pad_token", ""))
    if pad is None:
        raise DataError(f"{folder}: no pad_token; name one in tokenizer_config.json")
    return TextTokenizer(backend, style, pad)
