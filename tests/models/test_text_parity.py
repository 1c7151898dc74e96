"""transformers' text models in torch are the oracle of every text tower."""

import copy
import os

import jax
import numpy as np
import pytest
from greedy import (
    NEW,
    Greedy,
    assert_same_choices,
    assert_same_words,
    forced,
    our_greedy,
    torch_greedy,
)
from safetensors.numpy import save_file
from text_cases import FAMILIES, TOWERS, VOCAB, drawn
from text_towers import (
    PROMPTS,
    assert_torch_agrees,
    in_sections,
    make_oracle,
    oracle,
    table,
    torch,
    torch_inputs,
)

from jaxvlm.hf.families import llama
from jaxvlm.hf.families.name_map import NameMap
from jaxvlm.nn.param import merge
from jaxvlm.types import Batch


@pytest.mark.parametrize("name", TOWERS)
def test_logits_loss_and_gradients_are_torchs(name):
    assert_torch_agrees(TOWERS[name][0], oracle(name))


def torch_decode_uncached(model, inputs):
    """Greedy choices of a text tower that has no ``generate``; each token is a forward pass."""
    ids, logits = [], []
    after = inputs["position_ids"].amax((0, 2)) + 1
    for step in range(NEW):
        with torch.no_grad():
            logits.append(model(**inputs).logits[:, -1])
        ids.append(logits[-1].argmax(-1))
        new = (after + step).expand(3, -1)
        news = {"input_ids": ids[-1], "attention_mask": torch.ones_like(after), "position_ids": new}
        inputs = {k: torch.cat([x, news[k][..., None]], -1) for k, x in inputs.items()}
    return Greedy(torch.stack(ids, 1).numpy(), torch.stack(logits, 1).numpy())


# Each compiles a loop and a forward pass: CI's long run has most of them.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if i % 4 else [])
        for i, name in enumerate(TOWERS)
    ],
)
def test_greedy_decoding_gives_torchs_ids(name):
    theirs, config, graph, params = oracle(name)
    batch = PROMPTS
    if in_sections(TOWERS[name][0]):
        shape = (len(batch.tokens), 3, batch.tokens.shape[1])
        noise = np.random.default_rng(9).integers(0, 5, shape, np.int32)
        batch = batch._replace(positions=batch.positions + noise)
    decode = torch_decode_uncached if in_sections(TOWERS[name][0]) else torch_greedy
    made = decode(copy.deepcopy(theirs), torch_inputs(batch))

    def module(params):
        return merge(graph, params)

    # Gemma 3 scales its embeddings, which are its head too: drawn at random, it repeats a word.
    varied = TOWERS[name][0] != "Gemma3Text"
    assert_same_choices(our_greedy(module, params, batch, config), made, varied, over=12)
    if config.rope_scaling.kind == "dynamic":
        return  # its angles depend on the row's length: a longer row says other words
    out = jax.jit(lambda p, b: module(p)(b))(params, forced(batch, made))
    assert_same_words(out.logits(out.hidden), made)


@pytest.mark.parametrize("name", ["gemma3: two bases, linear", "mistral: window, yarn"])
def test_packed_questions_see_through_a_window_what_separate_rows_see(name):
    _, _, graph, params = oracle(name)
    rng = np.random.default_rng(5)
    head, questions = 6, (4, 7, 5)
    pieces = [rng.integers(3, VOCAB, n).astype(np.int32) for n in (head, *questions)]
    sizes = [len(piece) for piece in pieces]
    whole = np.concatenate(pieces)[None]
    segment = np.repeat(np.arange(1, 5, dtype=np.int32), sizes)[None]
    places = [np.arange(n, dtype=np.int32) + (head if i else 0) for i, n in enumerate(sizes)]
    # The parent's tokens see both ways, as an image's may.
    group = (segment == 1).astype(np.int32)
    packed = Batch(
        whole,
        None,
        np.concatenate(places)[None, None],
        segment,
        (segment > 1).astype(np.int32),
        group,
    )
    run = jax.jit(lambda p, b: merge(graph, p)(b).hidden)
    together = np.asarray(run(params, packed))[0]
    length = head + max(questions)
    rows = np.zeros((3, length), np.int32)
    real = np.zeros_like(rows)
    for row, question in enumerate(pieces[1:]):
        rows[row, : head + len(question)] = np.concatenate([pieces[0], question])
        real[row, : head + len(question)] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (3, 1, length))
    both_ways = np.where(np.arange(length) < head, real, 0).astype(np.int32)
    apart = np.asarray(run(params, Batch(rows, None, positions, real, None, both_ways)))
    first = head
    for row, n in enumerate(questions):
        np.testing.assert_allclose(
            together[first : first + n], apart[row, head : head + n], rtol=2e-4, atol=2e-5
        )
        first += n


def test_joined_experts_are_the_same_experts():
    """The larger models' checkpoints hold a layer's experts in two tensors, inputs first."""
    theirs, config, _, params = oracle("qwen3-vl-moe")
    tensors = {
        name: x.transpose(1, 2).numpy() if x.ndim == 3 else x.numpy()
        for name, x in theirs.state_dict().items()
    }
    lies = llama.entries(config, "model.", "", joined_experts=True)
    how = NameMap(lies, llama.dims(config), llama.depths(config))
    again = how.load(tensors)
    jax.tree.map(np.testing.assert_array_equal, again, params)
    written = how.dump(params)
    jax.tree.map(np.testing.assert_array_equal, written, tensors)


@pytest.mark.parametrize("name", [n for n in TOWERS if not in_sections(TOWERS[n][0])])
def test_transformers_loads_what_we_write(name, tmp_path):
    theirs, config, _, params = oracle(name)
    save_file(
        NameMap(*table(config)).dump(params), tmp_path / "model.safetensors", {"format": "pt"}
    )
    theirs.config.save_pretrained(tmp_path)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for tensor, x in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[tensor], x), tensor


DRAWS = int(os.environ.get("JAXVLM_DRAWS", "1"))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_settings_drawn_at_random_are_torchs(family, seed, parity):
    """``JAXVLM_DRAWS=10`` draws ten a family."""
    parity(family, seed, *assert_torch_agrees(family, make_oracle(family, drawn(family, seed))))
