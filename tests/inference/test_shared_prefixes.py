"""Prompts that share images read them once, and answer as each alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from builders import TINY, devices_of

from jaxvlm.config import Config, ConnectorConfig, DataConfig, MeshConfig, RelevanceConfig
from jaxvlm.data import image_placeholders
from jaxvlm.data.images import image_files
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.inference import prompts
from jaxvlm.inference.vlm import VLM
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Span

WORDS = "what is it a cat dog or the user red green blue"
MESHES = {
    "one": MeshConfig(data=1),
    "data": MeshConfig(data=2),
    "pipeline": MeshConfig(data=2, pipeline=2),
}


def vlm_of(mesh, trail=(), **changes):
    """A model of random weights; an image is 4 visual tokens, and the tokens of ``trail``."""
    tokenizer = chat_tokenizer.build([WORDS])
    decoder = dataclasses.replace(
        TINY.decoder, vocab_size=64, depth=2, width=32, remat="full", **changes
    )
    vision = dataclasses.replace(TINY.vision, remat="full")
    config = Config(
        model=dataclasses.replace(TINY, decoder=decoder, vision=vision),
        data=DataConfig(max_length=256),
    )
    model = build_model(config.model, make_mesh(mesh, devices_of(mesh)))
    params = jax.tree.map(lambda x: x * 3, model.init(0))

    def span(width, height):
        return Span.of(tokenizer.image_id, 4, [5], trail)

    images = image_files.ImageFormat(image_files.squares(16), 16, span)
    return VLM(config, model, params, tokenizer, images)


def drawn(count):
    """u8[count, 16, 16, 3]."""
    return np.random.default_rng(0).integers(0, 256, (count, 16, 16, 3), np.uint8)


class Decoded(Sequence):
    """Images that are decoded each time, as a video's frames are."""

    def __init__(self, frames):
        self.frames = frames

    def __len__(self):
        return len(self.frames)

    def __getitem__(self, i):
        return np.array(self.frames[i])


def texts(count=8):
    words = WORDS.split()
    return [" ".join((words[i:] + words[:i]) * 6) for i in range(count)]


def asked(images):
    """Eight long questions about three images each, the first one of two, in no order."""
    which = (0, 0, 1, 1, 1, 0, 0, 1)
    return [([images[i], *images[2:4]], text) for i, text in zip(which, texts(), strict=True)]


def shared(vlm, queries, share=True):
    how = (vlm.model, vlm.tokenizer, vlm.image_format, 10**6)
    return prompts.to_answer(queries, *how, share=share)


@pytest.mark.parametrize("kv", ["none", "vl_cache"])
@pytest.mark.parametrize("mesh", MESHES)
def test_they_answer_as_each_alone(mesh, kv):
    """Tokens that end an image after its visual tokens are observed as the question's are."""
    vlm, images = vlm_of(MESHES[mesh], trail=[6, 7, 8]), list(drawn(4))
    queries = asked(images)
    shards = 1 if mesh == "one" else 2
    prefixes = shared(vlm, queries).prefixes
    assert prefixes.of.shape == (shards, 8 // shards)
    assert len(prefixes.batch.tokens) == 2 * shards
    settings = {} if kv == "none" else {"kv": kv, "kv_budget": 0.2, "kv_queries": 200}
    together = vlm.generate_batch(queries, max_new_tokens=6, **settings)
    assert len(set(together)) > 1
    assert kv == "none" or vlm.kv_memory.stored < 0.5 * vlm.kv_memory.whole
    assert together == [
        vlm.generate_batch([one], max_new_tokens=6, **settings)[0] for one in queries
    ]


def test_what_may_not_be_shared_is_not():
    """Prompts that attend both ways, one without an image, few that share, long padding."""
    images = list(drawn(10))
    vlm = vlm_of(MESHES["one"], trail=[6, 7, 8])
    queries = asked(images)
    assert shared(vlm, queries).prefixes is not None
    assert shared(vlm, [*queries, ([], "what is it")]).prefixes is None
    assert (
        shared(vlm, [([images[i]], text) for i, (_, text) in enumerate(queries)]).prefixes is None
    )
    assert shared(vlm, [([images[0]], "what is it")] * 4).prefixes is None  # 64 tokens, not 32
    assert shared(vlm_of(MESHES["one"], [6, 7, 8], visual_mask="prefix"), queries).prefixes is None


def test_prompts_longer_than_what_a_run_was_trained_on_are_said(caplog):
    vlm, images = vlm_of(MESHES["one"]), list(drawn(4))
    data = dataclasses.replace(vlm.config.data, train="a.jsonl")
    queries = asked(images)
    longest = max(shared(vlm, [query]).longest for query in queries)
    for share in (True, False):
        assert shared(vlm, queries, share).longest == longest
    for limit, lines in ((longest, 0), (longest - 1, 1)):
        vlm.config = dataclasses.replace(
            vlm.config, data=dataclasses.replace(data, max_length=limit)
        )
        vlm.generate_batch(queries, max_new_tokens=1)
        said = [x for x in caplog.messages if "trained on sequences" in x]
        assert len(said) == lines
    assert f"{longest} tokens" in said[0] and f"most {limit} (config.data.max" in said[0]


def test_images_that_are_decoded_each_time_are_read_as_they_are():
    """They live for a moment, each at the address of the one before."""
    vlm, frames = vlm_of(MESHES["one"]), drawn(4)
    for share in (True, False):
        asked = [(Decoded(frames[i : i + 1]), "what is it") for i in range(4)]
        batch = shared(vlm, asked, share).batch
        for i in range(4):
            np.testing.assert_array_equal(np.asarray(batch.pixels)[i, 0], frames[i])
    stack = shared(vlm, [(Decoded(frames), "what is it")]).batch
    np.testing.assert_array_equal(np.asarray(stack.pixels)[0], frames)


@pytest.mark.parametrize("by_question", [True, False])
def test_tokens_that_depend_on_the_question_are_not_shared(by_question):
    vlm = vlm_of(MESHES["one"])
    relevance = RelevanceConfig(budget=7, query=by_question)
    config = dataclasses.replace(vlm.model.config, connector=ConnectorConfig(relevance=relevance))
    image_id = vlm.tokenizer.image_id
    tokens = image_placeholders.expand(np.array([5, image_id, 6]), image_id, [Span.of(image_id, 4)])
    stub = dataclasses.replace(vlm.model, config=config)
    asked = [prompts._Sequence(tokens, [])]
    assert prompts._can_share(stub, asked, image_id) is not by_question
