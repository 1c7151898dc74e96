"""Texts -> rows of a text encoder."""

from __future__ import annotations

import json
import logging
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers

from jaxvlm.data import tokenizer
from jaxvlm.data.errors import DataError
from jaxvlm.types import TextStyle

log = logging.getLogger(__name__)
_LENGTH_STEP = 16
"""Rows are padded to a multiple of it, so that few lengths are compiled."""


class TextTokenizer:
    """A tokenizer that puts its special tokens around a text.

    Args:
        backend: the `tokenizers` object; its own truncation and padding are switched off.
        style: how texts become rows.
        pad_id: of padding.
    """

    def __init__(self, backend: tokenizers.Tokenizer, style: TextStyle, pad_id: int):
        backend.no_padding()
        backend.enable_truncation(style.max_length)
        self.backend, self.style, self.pad_id = backend, style, pad_id

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. Texts that are too long are cut, and counted in the log."""
        ids, cut = self.encode_within(texts, self.style.max_length)
        if cut:
            log.warning(
                "%d of %d texts are longer than %d tokens and were cut",
                cut,
                len(texts),
                self.style.max_length,
            )
        return ids

    def encode_within(self, texts: Sequence[str], length: int) -> tuple[list[list[int]], int]:
        """Ids of each text.

        Args:
            texts: what to encode.
            length: tokens at most, special ones counted; no more than the style's.

        Returns:
            The ids, and how many texts were cut.

        Raises:
            DataError: a length that special tokens fill alone.
        """
        if length <= (special := self.backend.num_special_tokens_to_add(False)):
            raise DataError(f"rows of {length} tokens have no room beside {special} special ones")
        self.backend.enable_truncation(length)
        found = self.backend.encode_batch([self.style.clean(text) for text in texts])
        return [e.ids for e in found], sum(bool(e.overflowing) for e in found)

    def length(self, ids: Sequence[Sequence[int]]) -> int:
        """Of the rows that hold these texts: one of a few."""
        longest = self.style.max_length if self.style.see_padding else max(map(len, ids))
        return min(self.style.max_length, -(-max(longest, 1) // _LENGTH_STEP) * _LENGTH_STEP)

    def rows(
        self, ids: Sequence[Sequence[int]], count: int, length: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts one below the other, padded on the right.

        Args:
            ids: of each text.
            count: rows; those behind the texts hold a token of padding each.
            length: T; 0: as :meth:`length` says.

        Returns:
            i32[count, T] tokens, and i32[count, T] segments: 1 where a token is seen.
        """
        tokens = np.full((count, length or self.length(ids)), self.pad_id, np.int32)
        segment = np.full(tokens.shape, int(self.style.see_padding), np.int32)
        segment[:, 0] = 1
        for row, text in enumerate(ids):
            tokens[row, : len(text)], segment[row, : len(text)] = text, 1
        return tokens, segment

    def save(self, folder: pathlib.Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, as :func:`load` reads them."""
        folder.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(folder / "tokenizer.json"))
        named = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.style.max_length,
            "pad_token": self.backend.id_to_token(self.pad_id),
        }
        text = json.dumps(named, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def load(folder: pathlib.Path, style: TextStyle) -> TextTokenizer:
    """The tokenizer of an encoder's folder.

    Args:
        folder: holds ``tokenizer.json``.
        style: how the model's family makes rows of texts.

    Raises:
        DataError: a file is missing or broken, or no token of padding is named.
    """
    backend, _, special = tokenizer.read(folder)
    pad = backend.token_to_id(special.get("pad_token", ""))
    if pad is None:
        raise DataError(f"{folder}: no pad_token; name one in tokenizer_config.json")
    return TextTokenizer(backend, style, pad)
