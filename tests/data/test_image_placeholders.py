"""Images of several tiles, with text among them and positions of their own, packed and alone."""

import numpy as np

from jaxvlm.data import image_placeholders
from jaxvlm.data.conversations import packing, tokenize
from jaxvlm.data.conversations.collate import Layout, collate
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.types import Span

SOFT = 90  # what features stand on; the chat template writes another token


def tiled(count: int) -> Span:
    """``count`` tiles of two features, a text token before each; three rows of positions."""
    ids = np.asarray([[91, SOFT, SOFT]] * count, np.int32).reshape(-1)
    tile = np.asarray([[0, i + 1, i + 1] for i in range(count)], np.int32).reshape(-1)
    positions = np.stack([np.zeros(len(ids)), np.arange(len(ids)) // 3, np.arange(len(ids)) % 3])
    return Span(ids, tile, positions.astype(np.int32), count + 1)


OF = {"a.png": tiled(1), "b.png": tiled(3)}


def records(questions):
    turns = [
        (Turn("user", f"<image>and<image> {question}"), Turn("assistant", "red"))
        for question in questions
    ]
    return [Record(str(i), t, ("a.png", "b.png")) for i, t in enumerate(turns)]


def laid_out(tokenizer, questions, share):
    corpus, problems = tokenize.encode(records(questions), tokenizer, OF.get)
    assert not problems
    pieces, refused = packing.build_pieces(corpus, tokenizer.image_id, packing.Limits(80, 8), share)
    assert not refused and pieces.num_images.tolist() == [4] * len(pieces.num_images)
    rows = [np.arange(len(pieces.num_tokens))]
    layout = Layout(tokenizer.image_id, 0, 12, share, "prefix", 3)
    return corpus, collate(corpus, pieces, rows, 80, layout)[0]


def test_a_row_is_what_its_conversations_are_alone(word_tokenizer):
    questions = ["what color is it?", "is it red?", "what is it?"]
    for share in (False, True):
        corpus, batch = laid_out(word_tokenizer, questions, share)
        for i in range(3):
            ids = corpus.tokens[corpus.first[i] : corpus.last[i]]
            want = image_placeholders.expand(ids, word_tokenizer.image_id, list(OF.values()))
            own = 2 + i if share else 1 + i
            mine = batch.segment[0] == own
            if share:
                mine |= batch.segment[0] == 1
                assert (batch.parent[0][batch.segment[0] == own] == 1).all()
            np.testing.assert_array_equal(batch.tokens[0][mine], want.ids)
            np.testing.assert_array_equal(batch.positions[0][:, mine], want.positions)
            np.testing.assert_array_equal(batch.bidirectional[0][mine] > 0, want.tile > 0)
        starts = batch.image_start[0]
        used = starts[starts >= 0]
        assert len(used) == (4 if share else 12)
        for slot, at in enumerate(used.tolist()):
            assert (batch.tokens[0, at : at + 2] == SOFT).all()
            assert (batch.bidirectional[0] == slot + 1).sum() == 2
            assert batch.bidirectional[0, at] == slot + 1


def test_tiles_count_as_images(word_tokenizer):
    corpus, _ = tokenize.encode(records(["what?"]), word_tokenizer, OF.get)
    _, refused = packing.build_pieces(corpus, word_tokenizer.image_id, packing.Limits(80, 3), True)
    assert refused == [
        (0, "more than data.max_images_per_sequence=3 images", "2 images of 4 tiles")
    ]


def test_text_around_an_image():
    span = Span.of(SOFT, 3, before=(1, 2), after=(4,))
    assert span.ids.tolist() == [1, 2, SOFT, SOFT, SOFT, 4]
    assert span.starts.tolist() == [2] and span.advance == 6
