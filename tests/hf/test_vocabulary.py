"""A tokenizer with more tokens than its model has embeddings is refused with advice that works."""

import pytest

from jaxvlm.config import ConfigError, DecoderConfig, ModelConfig
from jaxvlm.hf.run_processor import with_vocab


def model(rows, checkpoint=""):
    return ModelConfig(decoder=DecoderConfig(vocab_size=rows), checkpoint=checkpoint)


def test_a_checkpoint_needs_more_rows():
    """Its size is not the recipe's to set, so that is not what is advised."""
    with pytest.raises(ConfigError, match=r"has 70 tokens, .* for 64; .*_embeddings\(70\)") as said:
        with_vocab(model(64, "folder"), 70)
    assert "folder: its tokenizer" in str(said.value) and "vocab_size" not in str(said.value)
    assert with_vocab(model(64, "folder"), 64).decoder.vocab_size == 64


def test_a_recipe_takes_the_tokenizers_size():
    with pytest.raises(ConfigError, match=r"decoder\.vocab_size=64 is less than .* 70 tokens; set"):
        with_vocab(model(64), 70)
    assert with_vocab(model(0), 70).decoder.vocab_size == 128
