"""Exact match is what comparing ``generate``'s answers gives, for templates of every shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from builders import TINY
from tokenizers import AddedToken

from jaxvlm.config import Config, DataConfig, MeshConfig
from jaxvlm.data.conversations import tokenize
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.images import image_files
from jaxvlm.data.sources.conversation_formats import Record, Turn
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.inference.evaluator import Evaluator
from jaxvlm.inference.vlm import VLM
from jaxvlm.losses.next_token import targets, token_scores
from jaxvlm.parallel.mesh import make_mesh
from jaxvlm.spmd.model import build_model
from jaxvlm.types import Batch, Span
from tests.data.test_tokenize import SHAPES

LENGTH, WORDS = 64, ("red", "blue", "yes", "no", "circle")
KEYS = [f"question-{i}" for i in range(2 * len(SHAPES))]  # a token each: easily learned by heart
DATA = DataConfig(train="x", batch_size=4, max_length=LENGTH, max_images_per_sequence=1)


def learned(shape, i):
    """The answer that the model has learned by heart: drawn for the question, with a special token
    that no template writes.
    """
    rng = np.random.default_rng([list(SHAPES).index(shape), i])
    return " <|box|>".join(rng.choice(WORDS, 2, replace=False))


def records_of(shape, answers):
    """A record for each (number of a question, answer)."""
    number = 2 * list(SHAPES).index(shape)
    return [
        Record(
            f"r{i}",
            (Turn("user", f"{KEYS[number + question]}?"), Turn("assistant", answer)),
            (),
            {"kind": f"r{i}"},
        )
        for i, (question, answer) in enumerate(answers)
    ]


def trained_by_heart(model, rows):
    """Parameters with which the model says every trained token of ``rows`` (ids, loss)."""
    shape = len(rows), max(len(ids) for ids, _ in rows)
    tokens, weight, segment = (np.zeros(shape, dtype) for dtype in (np.int32, "f4", np.int32))
    for row, (ids, loss) in enumerate(rows):
        tokens[row, : len(ids)], weight[row, : len(ids)], segment[row, : len(ids)] = ids, loss, 1
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), (shape[0], 1, shape[1]))
    batch = Batch(*map(jnp.asarray, (tokens, weight, positions, segment)))
    optimizer = optax.adam(5e-3)

    def loss(params):
        labels, weight = targets(batch)
        nll, _ = token_scores(model.apply(params, batch), labels)
        return jnp.sum(nll * weight) / jnp.sum(weight), jnp.max(nll * weight)

    def step(carry):
        params, state, count, _ = carry
        (_, worst), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, count + 1, worst

    def unsure(carry):
        return (carry[3] > 0.3) & (carry[2] < 400)

    @jax.jit
    def fit(params):
        start = params, optimizer.init(params), 0, jnp.float32(9)
        return jax.lax.while_loop(unsure, step, start)

    params, _, _, worst = fit(model.init(0))
    assert worst <= 0.3
    return params


@pytest.fixture(scope="module")
def by_heart():
    """(VLM that knows the learned answers, evaluator, tokenizer of each shape)."""
    texts = [*WORDS, "<think>\n\n</think>\n\n", "system\nuser\nassistant\n", "end of turn over"]
    base = chat_tokenizer.build(texts * 3, "bpe", 340)
    base.backend.add_special_tokens(
        [AddedToken(n, normalized=False) for n in ("<|start|>", "<|end|>", "<|box|>")]
    )
    base.backend.add_tokens(KEYS)
    ours = {
        shape: chat_tokenizer.ChatTokenizer(base.backend, template, base.special)
        for shape, template in SHAPES.items()
    }
    decoder = dataclasses.replace(TINY.decoder, vocab_size=384, depth=1)
    config = Config(model=dataclasses.replace(TINY, decoder=decoder), data=DATA)
    model = build_model(config.model, make_mesh(MeshConfig(data=1), jax.devices()[:1]))
    rows = []
    for shape, tokenizer in ours.items():
        known = records_of(shape, [(i, learned(shape, i)) for i in range(2)])
        corpus, problems = tokenize.encode(known, tokenizer, 4)
        assert not problems
        for first, last in zip(corpus.first, corpus.last):
            rows.append((corpus.tokens[first:last], corpus.loss[first:last]))
    params = trained_by_heart(model, rows)
    images = image_files.ImageFormat(image_files.squares(16), 16, lambda w, h: Span.of(3, 4))
    vlm = VLM(config, model, params, base, images)
    return vlm, ours


@pytest.fixture(scope="module")
def evaluators():
    return {}


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_match_is_that_of_generated_answers(shape, by_heart, evaluators):
    vlm, ours = by_heart
    vlm.tokenizer = ours[shape]
    known, other = learned(shape, 0), learned(shape, 1)
    answers = [(0, known), (0, known.split()[0]), (1, other), (1, f"{other} green")]
    records = records_of(shape, answers)
    dataset = load_dataset(DATA, ours[shape], image_size=16, num_patches=4, read=(records, []))
    evaluator = evaluators.setdefault("one", Evaluator(vlm.model, dataset, 4))  # compiled once
    evaluator.dataset = dataset
    metrics = evaluator.report(vlm.params, blind=False).metrics
    said = vlm.generate_batch([([], r.turns[0].content) for r in records], max_new_tokens=32)
    corpus, right = dataset.corpus, {}
    for i, (first, last) in enumerate(zip(corpus.first, corpus.last)):
        trained = corpus.tokens[first:last][corpus.loss[first:last]]
        right[f"exact_match/r{i}"] = ours[shape].decode(trained).strip() == said[i]
    assert {name: metrics[name] == 1 for name in right} == right
    assert list(right.values()) == [True, False, True, False]
    assert metrics["exact_match"] == 0.5 and said[0].endswith(known)
