"""Starting and reading pairs, from a file and packed: seconds, memory, pairs a second.

    PYTHONPATH=. python benchmarks/packed_pairs.py [--pairs 100000 1000000] [--packed 10000000]

Pairs of a question and an answer, of different texts, for a text encoder. Each is opened by a
process of its own, which has imported what it needs: the time until the first batch from the
opening on, until the first batch of a resume in the middle of the third pass, pairs a second of CPU
time (one worker, 500 batches of 256), and the anonymous memory after them (``RssAnon``; mapped
files are not in it), less what the process had before. The sets of ``--packed`` repeat the arrays
of the first, with texts that count as different, so that they have as many pairs to order.

The memory of a set is that of the order, which no batch has a text twice in: it grows with the
pairs, unlike that of packed conversations.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shutil
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.common import child, environment, write
from benchmarks.packed_sets import WORDS, anonymous_mib

NAME = "packed_pairs"
BATCHES, ROWS, LENGTH = 500, 256, 64


def collator() -> Any:
    """Texts as a text encoder takes them."""
    from jaxvlm.data.pairs.collate_texts import TextCollator
    from jaxvlm.data.tokenizer import chat_tokenizer
    from jaxvlm.data.tokenizer.text_tokenizer import TextTokenizer
    from jaxvlm.types import TextStyle

    words = chat_tokenizer.build(WORDS)
    return TextCollator(TextTokenizer(words.backend, TextStyle(LENGTH), words.pad_id))


def config(spec: str) -> Any:
    """Data settings of every run."""
    from jaxvlm.config import DataConfig

    return DataConfig(train=spec, batch_size=ROWS, max_length=LENGTH, workers=1)


def write_pairs(path: pathlib.Path, count: int) -> None:
    """Write different pairs to a JSONL file."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(count):
            drawn = (rng.integers(len(WORDS), size=n) for n in rng.integers((6, 12), (16, 32)))
            query, positive = (" ".join(WORDS[k] for k in words) for words in drawn)
            file.write(json.dumps({"id": str(i), "query": query, "positive": positive}) + "\n")


def pack(spec: str, folder: str) -> dict[str, float]:
    """Pack a file; returns seconds."""
    from jaxvlm.data.packed import packed_files
    from jaxvlm.data.pairs import packed_pairs
    from jaxvlm.data.pairs.dataset import PairDataset

    began, rows = time.perf_counter(), collator()
    data = PairDataset.from_config(config(spec), rows)
    made = packed_pairs.made_for(data.config, (rows, rows))
    with packed_files.new_folder(folder) as partial:
        packed_pairs.write(partial, data.corpus, made, rows.tokenizer, data.config, 2**28)
    size = sum(path.stat().st_size for path in pathlib.Path(folder).rglob("*") if path.is_file())
    return {
        "pairs": len(data.examples),
        "seconds": round(time.perf_counter() - began, 1),
        "mib": round(size / 2**20, 1),
    }


def repeat(source: pathlib.Path, target: pathlib.Path, times: int) -> None:
    """Write a set that holds another one's pairs ``times`` times, as pairs of different texts."""
    from jaxvlm.data.packed import packed_files

    shutil.copytree(source, target)
    read = {path.stem: np.load(path) for path in source.glob("*.npy")}
    sizes = {name: len(array) for name, array in read.items()}
    contents = 1 + max(int(read[f"{side}_content"].max()) for side in ("query", "document"))
    steps = {
        "query": sizes["query_length"], "document": sizes["document_length"],
        "group": contents, "query_content": contents, "document_content": contents,
    }  # fmt: skip
    of = {"query_first": "query_tokens", "document_first": "document_tokens", "first": "document"}
    for name, array in read.items():
        if "_span_" in name or name.startswith("path") or "instruction_text" in name:
            continue
        if name.endswith("_start") or name in of:
            step = sizes[of.get(name, name.removesuffix("_start"))]
            parts = [array[:-1] + i * step for i in range(times)]
            made = np.concatenate([*parts, [times * step]])
        else:
            made = np.concatenate([array + i * steps.get(name, 0) for i in range(times)])
        np.save(target / f"{name}.npy", made.astype(array.dtype))
    index = packed_files.read_index(str(source))
    for name in ("records", "total", "queries", "documents", "tokens"):
        index[name] *= times
    (target / "packed.json").unlink()
    packed_files.seal(target, {k: v for k, v in index.items() if k not in ("files", "format")})


def measure(spec: str) -> dict[str, Any]:
    """Open pairs and read them, in a process that has done nothing else."""
    from jaxvlm.data.pairs.dataset import PairDataset

    importlib.import_module("grain")  # a run's first batch imports it
    rows = collator()
    before = anonymous_mib()

    def opened(step: float) -> Any:
        began = time.perf_counter()
        data = PairDataset.from_config(config(spec), rows)
        built = time.perf_counter() - began
        batches = data.train(np.arange(ROWS), int(step * data.steps_per_epoch))
        next(batches)
        return data, batches, built, time.perf_counter() - began

    data, batches, built, first = opened(0)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(BATCHES):
        next(batches)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = anonymous_mib() - before
    batches.close()
    found = {
        "from": "set" if pathlib.Path(spec).is_dir() else "file",
        "pairs": len(data.examples),
        "opened_s": round(built, 2),
        "first_batch_s": round(first, 2),
        "anonymous_mib": round(memory, 1),
        "pairs_per_s": round(BATCHES * ROWS / wall),
        "pairs_per_cpu_s": round(BATCHES * ROWS / cpu),
    }
    del data, batches
    _, batches, _, resumed = opened(2.5)
    batches.close()
    return found | {"resume_s": round(resumed, 2)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, nargs="+", default=[10**5, 10**6])
    parser.add_argument("--packed", type=int, nargs="*", default=[10**7])
    parser.add_argument("--measure", help="a file or set to measure in this process")
    parser.add_argument("--pack", nargs=2, help="a file to pack in this process, and its folder")
    args = parser.parse_args()
    if args.measure or args.pack:
        print(json.dumps(measure(args.measure) if args.measure else pack(*args.pack)))
        return

    with tempfile.TemporaryDirectory() as made:
        packing, rows = [], []
        for count in args.pairs:
            file, folder = pathlib.Path(made) / f"{count}.jsonl", pathlib.Path(made) / str(count)
            write_pairs(file, count)
            packing.append(child(__file__, "--pack", str(file), str(folder)))
            rows += [
                child(__file__, "--measure", str(file)),
                child(__file__, "--measure", str(folder)),
            ]
        for count in args.packed:
            largest = max(args.pairs)
            repeat(pathlib.Path(made) / str(largest), pathlib.Path(made) / "more", count // largest)
            rows.append(child(__file__, "--measure", str(pathlib.Path(made) / "more")))
    write(f"{NAME}.json", {"packing": packing, "rows": rows, **environment()})


if __name__ == "__main__":
    main()
