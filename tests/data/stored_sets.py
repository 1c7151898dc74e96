"""Data sets of files, and the sets that `jaxvlm data pack` makes of them."""

import dataclasses
import os
import re

import jaxtyping
import numpy as np

from jaxvlm.config import DataConfig
from jaxvlm.data.conversations import packed_set
from jaxvlm.data.conversations.dataset import load_dataset
from jaxvlm.data.errors import DataError
from jaxvlm.data.images import image_files
from jaxvlm.data.packed import packed_files
from jaxvlm.data.pairs import packed_pairs
from jaxvlm.data.pairs.dataset import PairDataset
from tests.data.any_size import span_of

BASE = DataConfig(
    batch_size=8, max_length=64, max_images_per_sequence=3, max_skip_fraction=0.5, prefetch=1
)
SIZES = {"image_size": 8, "num_patches": 4}


def of_files(records, tokenizer, sizes, **more):
    config = dataclasses.replace(BASE, **more)
    return load_dataset(config, tokenizer, read=(records, []), **sizes)


def packed(data, folder, shard_bytes=2000):
    """What ``data pack`` writes of a data set."""
    with packed_files.new_folder(str(folder)) as partial:
        made = packed_set.made_for(
            data.config, data.settings, data.tokenizer, data.facts.has_videos
        )
        packed_set.write(partial, data.content, made, data.tokenizer, data.config, shard_bytes)
    return str(folder)


def opened(folder, tokenizer, sizes, **more):
    return load_dataset(dataclasses.replace(BASE, **more), tokenizer, spec=folder, **sizes)


def any_size(qwen, tokenizer):
    """Settings of images of any size."""
    images = image_files.ImageFormat(qwen.prepare, 0, span_of(tokenizer), False, qwen.patching)
    sizes = {"image_size": 0, "num_patches": images.of_file, "prepare": images.prepare}
    return sizes | {"patching": images.patching}


def packed_pairs_of(data, folder, shard_bytes=2000):
    """What ``data pack`` writes of a data set of pairs."""
    both = (data.queries.collator, data.documents.collator)
    made = packed_pairs.made_for(data.config, both)
    with packed_files.new_folder(str(folder)) as partial:
        packed_pairs.write(partial, data.corpus, made, both[0].tokenizer, data.config, shard_bytes)
    return str(folder)


def opened_pairs(folder, data, seed=0, **more):
    """The set as a run with the settings of ``data`` opens it, but for what is given."""
    of_pairs = {f.name for f in dataclasses.fields(data.config.pairs)}
    pairs = {k: v for k, v in more.items() if k in of_pairs}
    rest = {k: v for k, v in more.items() if k not in of_pairs}
    config = dataclasses.replace(
        data.config, train=folder, pairs=dataclasses.replace(data.config.pairs, **pairs), **rest
    )
    collators = data.queries.collator, data.documents.collator
    return PairDataset.from_config(config, collators[0], document_collator=collators[1], seed=seed)


def harmless(folder, kept, batches):
    """Names of a set's arrays in which a changed number changes no batch and is no error.

    Args:
        folder: of the set, whose arrays are changed at three places each, one after another.
        kept: a file to keep an array in meanwhile.
        batches: opens the set and compares its batches with those of the files.
    """
    found = set()
    for path in sorted(folder.glob("*.npy")):
        whole, size, named = path.read_bytes(), len(np.load(path)), False
        for place in {0, size // 2, size - 1} if size else ():
            array = np.load(path, mmap_mode="r+")
            array[place] = not array[place] if array.dtype == bool else array[place] + 1
            array.flush()
            try:
                batches()
            except DataError as error:
                assert re.search("not as it was packed|tokens there, and in this", str(error))
                named = True
            except jaxtyping.TypeCheckError:  # tests' own look at a span, which is damaged
                named = True
            del array  # what threads still have mapped stays as it was
            kept.write_bytes(whole)
            os.replace(kept, path)
        found |= set() if named else {path.stem}
    return found
