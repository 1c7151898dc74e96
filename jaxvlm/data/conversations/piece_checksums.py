"""Checksums of what a packed set holds, by piece and by sequence, for what is trained on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from jaxvlm.data.conversations.packing import Pieces
from jaxvlm.data.conversations.tokenize import Corpus
from jaxvlm.data.packed import checks

_OF_SEGMENT = ("record", "first", "last", "length", "offset")
_OF_PIECE = ("num_tokens", "num_images", "num_patches")


class Checksums:
    """Checksums of all that a batch has of a piece: tokens, loss, places, images, their tokens."""

    def __init__(self, corpus: Corpus, pieces: Pieces, paths: Sequence[str]):
        self._corpus, self._pieces, self._paths = corpus, pieces, paths
        self._of_segment = [getattr(pieces, name) for name in _OF_SEGMENT]
        self._of_piece = [getattr(pieces, name) for name in _OF_PIECE]
        self._span = checks.SpanChecksums()

    def of_piece(self, piece: int) -> int:
        """The checksum of a piece; an error where its arrays contradict each other."""
        corpus, pieces = self._corpus, self._pieces
        start, end = int(pieces.start[piece]), int(pieces.start[piece + 1])
        parts = [f"{start} {end}".encode()]  # a slice ends where its array does
        parts += [array[start:end].tobytes() for array in self._of_segment]
        parts += [array[piece : piece + 1].tobytes() for array in self._of_piece]
        for first, last in zip(pieces.first[start:end].tolist(), pieces.last[start:end].tolist()):
            parts += [corpus.tokens[first:last].tobytes(), corpus.loss[first:last].tobytes()]
        for image in pieces.images[piece]:
            text = f"{image} {self._span.of(corpus.spans[image])} {self._paths[image]}"
            parts.append(text.encode("utf-8", "surrogateescape"))
        return zlib.crc32(b"".join(parts))


def of_sequence(own: np.ndarray) -> int:
    """The checksum of a packed sequence: of the numbers of its pieces."""
    return zlib.crc32(np.asarray(own, np.int64).tobytes())
