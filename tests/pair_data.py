"""A small data set of pairs, and the rows that it is made into."""

import dataclasses

import jax
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from jaxvlm.config import DataConfig, PairDataConfig
from jaxvlm.data.images import image_files
from jaxvlm.data.images.processor import Processor
from jaxvlm.data.pairs.collate_texts import TextCollator
from jaxvlm.data.pairs.dataset import PairDataset
from jaxvlm.data.pairs.examples import Example, Item
from jaxvlm.data.tokenizer.text_tokenizer import TextTokenizer
from jaxvlm.types import TextStyle

BASE = DataConfig(batch_size=8, max_length=32, max_skip_fraction=0.5)
PAIRS = {f.name for f in dataclasses.fields(PairDataConfig)}


def text_tokenizer(**style):
    words = [*(f"w{i}" for i in range(60)), "query:", "find"]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("<s>", 1), ("</s>", 2)]
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    return TextTokenizer(backend, TextStyle(**{"max_length": 24} | style), 0)


def squares():
    return Processor(image_files.squares(8), 8, None, (0.5,) * 3, (0.5,) * 3)


def text_collator(**style):
    return TextCollator(text_tokenizer(**style), squares())


def dataset(examples, collator, problems=(), **more):
    pairs = PairDataConfig(**{k: v for k, v in more.items() if k in PAIRS})
    rest = {
        k: v for k, v in more.items() if k not in PAIRS and k not in ("seed", "document_collator")
    }
    config = dataclasses.replace(BASE, pairs=pairs, **rest)
    own = {k: v for k, v in more.items() if k in ("seed", "document_collator")}
    return PairDataset.from_config(config, collator, read=(list(examples), list(problems)), **own)


def take(batches, count):
    out = [next(batches) for _ in range(count)]
    batches.close()
    return out


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def shapes(batch):
    return {n: (v.shape, str(v.dtype)) for n, v in batch._asdict().items() if v is not None}


def texts(count=20, **more):
    return [Example(f"t{i}", Item(f"w{i}"), Item(f"w{i + 20} w1"), **more) for i in range(count)]
