"""Starting and reading packed sets of 1e5, 1e6 and 1e7 records: seconds, memory, records a second.

    PYTHONPATH=. python benchmarks/packed_sets.py [--records 100000 1000000 10000000]

One hundred thousand different conversations of text are packed by ``jaxvlm data pack``'s code, and
four times as many, to see what memory that takes for each. The larger sets repeat the arrays of the
first, so that they have as many records, tokens and sequences to find.
Each set is opened by a process of its own, which has imported what it needs: the time until the
first batch from the opening on, until the first batch of a resume in the middle of the third pass,
records a second of CPU time (one worker, 2,000 batches of eight sequences), and the anonymous
memory after them (``RssAnon``; mapped files are not in it), less what the process had before.
Targets: at 1e7 the first batch in 2 s and the resume in 3 s; the memory at 1e7 at most 1.2 times
that at 1e5.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shutil
import tempfile
import threading
import time
from typing import Any

import numpy as np

from benchmarks.common import child, environment, write

NAME = "packed_sets"
UNIQUE = 100_000
WORDS = [f"w{i}" for i in range(2_000)]
BATCHES, ROWS, LENGTH = 2_000, 8, 512
_STARTS = {"piece_start": "piece_record", "sequence_start": "sequence_piece"}
"""Arrays of places in another one."""


def config() -> Any:
    """Data settings of every set."""
    from jaxvlm.config import DataConfig

    return DataConfig(batch_size=ROWS, max_length=LENGTH, workers=1)


def write_records(path: pathlib.Path, count: int) -> None:
    """Write different conversations to a JSONL file."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(count):
            drawn = (rng.integers(len(WORDS), size=n) for n in rng.integers(4, 24, 2))
            asked, said = (" ".join(WORDS[i] for i in words) for words in drawn)
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"id": str(i), "messages": turns}) + "\n")


def pack(source: str, folder: str) -> dict[str, float]:
    """Pack a file; returns seconds, and the peak of the memory that no file holds."""
    from jaxvlm.data.conversations import packed_set
    from jaxvlm.data.conversations.dataset import load_dataset
    from jaxvlm.data.packed import packed_files
    from jaxvlm.data.tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer.build(WORDS)
    before, peak, done = anonymous_mib(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.05):
            peak = max(peak, anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    data = load_dataset(config(), tokenizer, spec=source, image_size=8, num_patches=4)
    with packed_files.new_folder(folder) as partial:
        made = packed_set.made_for(data.config, data.settings, tokenizer)
        packed_set.write(partial, data.content, made, tokenizer, data.config, 2**28)
    done.set()
    watcher.join()
    return {
        "records": len(data.records),
        "tokens": int(data.pieces.num_tokens.sum()),
        "seconds": round(time.perf_counter() - began, 1),
        "anonymous_peak_mib": round(peak - before, 1),
    }


def repeat(source: pathlib.Path, target: pathlib.Path, times: int) -> None:
    """Write a set that holds another one's records ``times`` times."""
    from jaxvlm.data.conversations import packed_set
    from jaxvlm.data.conversations.packing import Sequences
    from jaxvlm.data.conversations.piece_checksums import of_sequence
    from jaxvlm.data.packed import packed_files

    shutil.copytree(source, target)
    read = {path.stem: np.load(path) for path in source.glob("*.npy")}
    sizes = {name: len(array) for name, array in read.items()}
    steps = {  # what is added to an array's values in each repetition
        **dict.fromkeys(("first", "last", "piece_first", "piece_last"), sizes["tokens"]),
        "piece_record": sizes["first"], "source": sizes["first"],
        "sequence_piece": sizes["piece_num_tokens"],
    }  # fmt: skip
    for name, array in read.items():
        if name.startswith("span_"):
            continue
        if name.endswith("_start"):
            of = _STARTS.get(name, name.removesuffix("_start"))
            parts = [array[:-1] + i * sizes[of] for i in range(times)]
            made = np.concatenate([*parts, [times * sizes[of]]])
        else:
            made = np.concatenate([array + i * steps.get(name, 0) for i in range(times)])
        np.save(target / f"{name}.npy", made.astype(array.dtype))
    _, pieces, checksums = packed_set.mapped(str(target), target, str(target))
    found = map(checksums.of_piece, range(len(pieces.num_tokens)))
    np.save(target / "piece_checksum.npy", np.fromiter(found, np.uint32))
    sequences = Sequences(*(np.load(target / f"sequence_{x}.npy") for x in ("piece", "start")))
    np.save(target / "sequence_checksum.npy", np.fromiter(map(of_sequence, sequences), np.uint32))
    index = packed_files.read_index(str(source))
    for name in ("records", "sequences", "tokens"):
        index[name] *= times
    index["files"] = {n: [(target / n).stat().st_size, d] for n, (_, d) in index["files"].items()}
    text = json.dumps({"digest": packed_files.digest_of(index), "index": index})
    (target / "packed.json").write_text(text)


def anonymous_mib() -> float:
    """Memory of this process that no file holds."""
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("RssAnon")).split()[1]) / 1024


def measure(folder: str) -> dict[str, float]:
    """Open a set and read it, in a process that has done nothing else."""
    from jaxvlm.data.conversations.dataset import load_dataset
    from jaxvlm.data.tokenizer import chat_tokenizer

    importlib.import_module("grain")  # a run's first batch imports it
    tokenizer = chat_tokenizer.load(f"{folder}/tokenizer")
    before = anonymous_mib()

    def opened(step: float) -> Any:
        began = time.perf_counter()
        data = load_dataset(config(), tokenizer, image_size=8, num_patches=4, spec=folder)
        batches = data.train(np.arange(ROWS), int(step * data.steps_per_epoch))
        next(batches)
        return data, batches, time.perf_counter() - began

    data, batches, first = opened(0)
    records, wall, cpu = 0, time.perf_counter(), time.process_time()
    for _ in range(BATCHES):
        _, meta = next(batches)
        records += len(meta.record)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = anonymous_mib() - before
    batches.close()
    _, batches, resumed = opened(2.5)
    batches.close()
    return {
        "records": len(data.records),
        "tokens": int(data.pieces.num_tokens.sum()),
        "first_batch_s": round(first, 3),
        "resume_s": round(resumed, 3),
        "anonymous_mib": round(memory, 1),
        "records_per_s": round(records / wall),
        "records_per_cpu_s": round(records / cpu),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--measure", help="a set to measure in this process")
    parser.add_argument("--pack", nargs=2, help="a file to pack in this process, and its folder")
    args = parser.parse_args()
    if args.measure or args.pack:
        print(json.dumps(measure(args.measure) if args.measure else pack(*args.pack)))
        return

    with tempfile.TemporaryDirectory() as made:
        base, file = pathlib.Path(made) / "base", pathlib.Path(made) / "records.jsonl"
        packing, rows = [], []
        for count in (UNIQUE, 4 * UNIQUE):
            write_records(file, count)
            folder = base if count == UNIQUE else pathlib.Path(made) / "more"
            packing.append(child(__file__, "--pack", str(file), str(folder)))
        for count in args.records:
            folder = base
            if count > UNIQUE:
                folder = pathlib.Path(made) / str(count)
                repeat(base, folder, count // UNIQUE)
            rows.append(child(__file__, "--measure", str(folder)))
            if folder != base:
                shutil.rmtree(folder)
    write(f"{NAME}.json", {"packing": packing, "rows": rows, **environment()})


if __name__ == "__main__":
    main()
