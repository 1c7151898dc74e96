"""What the system answers to a file that does not fit reaches the user, whichever library writes.

Libraries have errors of their own, without the system's number (NumPy, safetensors, tokenizers).
"""

import contextlib
import errno
import resource

import numpy as np
import pytest

from jaxvlm.checkpoint.run_record import whole_file, write_whole
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.hf.exporter import new_folder
from jaxvlm.hf.safetensors import Stored, write_tensors
from jaxvlm.inference import embedding_files
from jaxvlm.inference.embedding_files import EmbeddingTable

VALUES = np.ones((4_000, 8), np.float32)  # 128 kB


@contextlib.contextmanager
def limited(most=20_000):
    """No file grows above ``most`` bytes: as a full disk, but for the error's number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def array(folder):
    with whole_file(folder / "a.npy") as file:
        np.save(file, VALUES)


def tensors(folder):
    write_tensors(folder, {"x": Stored("model.safetensors", "F32", VALUES.shape)}, lambda _: VALUES)


def tokenizer(folder):
    words = [f"word{i} number{i}" for i in range(1_000)]
    chat_tokenizer.build(words, "word", 2_000).save(folder)


def embeddings(suffix):
    def write(folder):
        rows = [{"id": str(i)} for i in range(len(VALUES))]
        table = EmbeddingTable(rows, [VALUES], VALUES.shape, VALUES.dtype)
        embedding_files.write(folder / f"a{suffix}", table)

    return write


WRITERS = {
    "text": (lambda folder: write_whole(folder / "a.txt", "a" * 100_000), "a.txt"),
    "NumPy": (array, "a.npy"),
    "safetensors": (tensors, "model.safetensors"),
    "tokenizers": (tokenizer, "tokenizer.json"),
    ".npy": (embeddings(".npy"), "a.npy"),
    ".npz": (embeddings(".npz"), "a.npz"),
    ".safetensors": (embeddings(".safetensors"), "a.safetensors"),
    ".jsonl": (embeddings(".jsonl"), "a.jsonl"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_that_does_not_fit_is_the_systems_error(writer, tmp_path):
    write, name = WRITERS[writer]
    with limited(), pytest.raises(OSError) as error:
        write(tmp_path)
    assert error.value.errno == errno.EFBIG
    if error.value.filename:  # a file that Python writes has none, as a tokenizer's
        assert error.value.filename == str(tmp_path / name)
    assert writer == "tokenizers" or error.value.filename
    write(tmp_path)
    assert (tmp_path / name).stat().st_size > 20_000


def test_an_export_that_does_not_fit_leaves_nothing(tmp_path):
    with limited(), pytest.raises(OSError, match="File too large"), new_folder(tmp_path / "x") as x:
        tensors(x)
    assert not list(tmp_path.iterdir())


def test_a_file_is_never_seen_in_part(tmp_path):
    """Not even where the process is killed in the middle: the name is the last thing it gets."""
    path = tmp_path / "a.txt"
    for before in (None, b"before"):
        if before:
            path.write_bytes(before)
        with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
            file.write(b"half")
            file.flush()
            assert (path.read_bytes() if path.exists() else None) == before
            raise KeyboardInterrupt
        assert (path.read_bytes() if path.exists() else None) == before
        assert list(tmp_path.iterdir()) == [path] * bool(before)
    write_whole(path, "after")
    assert path.read_bytes() == b"after" and list(tmp_path.iterdir()) == [path]
