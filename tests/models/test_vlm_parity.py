"""transformers' torch models are the oracle for whole VLMs: logits, loss, gradients, greedy ids."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from builders import worst_gradient
from greedy import assert_same_choices, assert_same_words, forced, our_greedy, torch_greedy
from numerics import close_in_norm
from text_cases import VOCAB
from text_cases import drawn as drawn_text
from vlm_cases import (
    CASES,
    DRAWS,
    ONE,
    ROWS,
    loss_and_grad,
    make_batch,
    oracle,
    rows_of,
    torch,
    torch_inputs,
    transformers,
)

from jaxvlm.hf.families import FAMILIES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", ROWS)
def test_logits_loss_and_gradients_are_torchs(name, rows, shows):
    several = [] if rows == "one image" else ["several images"]
    shows(oracle(name)[0].config.model_type, "import", "train", *several)
    assert_torch_agrees(name, rows)


def assert_torch_agrees(name, rows):
    """Logits, loss and every gradient: errors of logits, worst gradient."""
    theirs, ours, params = oracle(name)
    batch = make_batch(name, *rows_of(name, rows))
    given = torch_inputs(batch, name, rows_of(name, rows)[0])
    labels = torch.from_numpy(np.where(batch.loss_weight > 0, batch.tokens, -100)).long()
    logits = theirs(**given).logits
    theirs.zero_grad()
    flat = logits[:, :-1].flatten(0, 1)
    their_loss = torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten())
    their_loss.backward()
    named = {
        n: np.zeros(p.shape, np.float32) if p.grad is None else p.grad.numpy()
        for n, p in theirs.named_parameters()
    }
    their_grads = FAMILIES[theirs.config.model_type].weights(ours.config).load(named)

    (value, our_logits), grads = loss_and_grad(name)(params, batch)
    real = batch.segment > 0
    expected, got = logits.detach().numpy()[real], np.asarray(our_logits)[real]
    error = close_in_norm(got, expected, 1e-4)
    np.testing.assert_allclose(float(value), their_loss.item(), rtol=1e-5)
    worst = worst_gradient(grads, their_grads)
    seen = ["vision/stem/w", "connector/w_out", *({"connector/newline"} & their_grads.keys())]
    assert all(np.any(their_grads[p]) for p in seen)
    return float(error), float(np.abs(got - expected).max()), worst


TEXTS = {"gemma3": "Gemma3Text", "paligemma": "Gemma", "internvl": "Qwen3", "smolvlm": "Llama"}
TEXTS |= {"paligemma2": "Gemma2", "idefics3": "Llama", "llava-onevision": "Qwen2"}


def drawn(name, seed):
    """A case whose towers and connector are at random."""
    rng = np.random.default_rng((seed, list(CASES).index(name)))

    def one_of(*values):
        return values[rng.integers(len(values))]

    kind, fields = CASES[name]
    family = TEXTS.get(name) or one_of("Llama", "Mistral", "Qwen2")
    text = drawn_text(family, seed)
    text |= {"vocab_size": VOCAB, "initializer_range": 0.2}
    text["model_type"] = getattr(transformers, family + "Config").model_type
    heads = one_of(1, 2, 3, 5)
    vision = fields["vision_config"] | {
        "hidden_size": heads * one_of(4, 8),
        "num_attention_heads": heads,
        "intermediate_size": one_of(20, 28, 52),
        "num_hidden_layers": one_of(2, 3),
        "hidden_act": one_of("gelu", "quick_gelu", "gelu_pytorch_tanh", "silu", "relu"),
        "layer_norm_eps": one_of(1e-3, 1e-5, 1e-6),
    }
    tied = text["tie_word_embeddings"]
    drawn = fields | {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    if name.startswith("paligemma"):
        drawn |= {"projection_dim": text["hidden_size"], "tie_word_embeddings": True}
        text["tie_word_embeddings"] = True
    if name == "gemma3":
        drawn["mm_tokens_per_image"] = one_of(1, 4, 16)
        text["final_logit_softcapping"] = None  # else it is refused
    if name == "internvl":
        vision |= {"attention_bias": one_of(True, False), "use_qk_norm": one_of(True, False)}
        vision |= {"norm_type": one_of("layer_norm", "rms_norm")}
        vision |= {"use_mean_pooling": one_of(True, False)}
        vision |= {"use_absolute_position_embeddings": one_of(True, False)}
    if name in ("idefics3", "smolvlm"):
        drawn["scale_factor"] = one_of(1, 2, 4)
        text["pad_token_id"] = 0
    if name == "llava-mistral":
        drawn["vision_feature_layer"] = one_of(-1, -2, [-1, 1], [0, -2, -1])
        drawn["vision_feature_select_strategy"] = one_of("default", "full")
        drawn["multimodal_projector_bias"] = one_of(True, False)
    return kind, drawn


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_settings_drawn_at_random_are_torchs(name, seed, parity):
    """``JAXVLM_DRAWS=10`` draws ten a family."""
    CASES[f"{name}, drawn {seed}"] = drawn(name, seed)
    parity(name, seed, *assert_torch_agrees(f"{name}, drawn {seed}", list(ROWS)[seed % 2]))
    oracle.cache_clear()
    loss_and_grad.cache_clear()


@pytest.mark.parametrize("name", CASES)
def test_greedy_generation_gives_transformers_ids(name, shows):
    theirs, ours, params = oracle(name)
    shows(theirs.config.model_type, "generate")
    rows = [[ONE, 6], [2, ONE, 7], [5]]
    if "image_grid_pinpoints" in CASES[name][1]:
        rows = [[(40, 10), 6], [2, (33, 60), 7], [5]]
    batch = make_batch(name, rows, "left", seed=2)
    if ours.config.decoder.visual_mask == "prompt":
        batch = batch._replace(bidirectional=batch.segment)
    given = torch_inputs(batch, name, rows, prompt=True)
    made = torch_greedy(theirs, given)
    assert_same_choices(our_greedy(ours.module, params, batch, ours.config.decoder), made)
    out = jax.jit(ours.apply)(params, forced(batch, made))
    assert_same_words(out.logits(out.hidden), made)


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_changes_no_bit_and_no_name(name, shows):
    theirs, ours, params = oracle(name)
    shows(theirs.config.model_type, "export")
    weights = FAMILIES[theirs.config.model_type].weights(ours.config)
    written = weights.dump(params)
    named = {n: p.detach().numpy() for n, p in theirs.named_parameters()}
    spelled = weights.check({n: x.shape for n, x in named.items()}, "torch's parameters")
    assert spelled.keys() == written.keys()
    for tensor, theirs_name in spelled.items():
        np.testing.assert_array_equal(written[tensor], named[theirs_name])
