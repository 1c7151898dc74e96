"""Starting and reading packed sets of 1e5, 1e6 and 1e7 records: seconds, memory, records a second.

    PYTHONPATH=. python benchmarks/packed_sets.py [--records 100000 1000000 10000000]

One hundred thousand different conversations of text are packed by ``jaxvlm data pack``'s code; the
larger sets repeat its arrays, so that they have as many records, tokens and sequences to find.
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
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.common import environment, write

NAME = "packed_sets"
UNIQUE = 100_000
BATCHES, ROWS, LENGTH = 2_000, 8, 512
_STARTS = {"piece_start": "piece_record", "sequence_start": "sequence_piece"}
"""Arrays of places in another one."""


def config() -> Any:
    """Data settings of every set."""
    from jaxvlm.config import DataConfig

    return DataConfig(batch_size=ROWS, max_length=LENGTH, workers=1)


def build(folder: pathlib.Path) -> dict[str, float]:
    """Pack the different records; returns seconds and the peak of memory."""
    import resource

    from jaxvlm.data.conversations import packed_files, packed_set
    from jaxvlm.data.conversations.dataset import load_dataset
    from jaxvlm.data.sources.conversation_formats import Record, Turn
    from jaxvlm.data.tokenizer import chat_tokenizer

    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(2_000)]
    records = []
    for i in range(UNIQUE):
        asked, said = (" ".join(rng.choice(words, n)) for n in rng.integers(4, 24, 2))
        records.append(Record(str(i), (Turn("user", asked), Turn("assistant", said)), ()))
    tokenizer = chat_tokenizer.build(words)
    began = time.perf_counter()
    data = load_dataset(config(), tokenizer, read=(records, []), image_size=8, num_patches=4)
    with packed_files.new_folder(str(folder)) as partial:
        made = packed_set.made_for(data.config, data.settings, tokenizer)
        packed_set.write(partial, data.content, made, tokenizer, data.config, 2**28)
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def repeat(source: pathlib.Path, target: pathlib.Path, times: int) -> None:
    """Write a set that holds another one's records ``times`` times."""
    from jaxvlm.data.conversations import packed_files, packed_set
    from jaxvlm.data.conversations.packing import Sequences
    from jaxvlm.data.conversations.piece_checksums import of_sequence

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
    _, pieces, checksums = packed_set.mapped(target, str(target))
    found = map(checksums.of_piece, range(len(pieces.num_tokens)))
    np.save(target / "piece_checksum.npy", np.fromiter(found, np.uint32))
    sequences = Sequences(*(np.load(target / f"sequence_{x}.npy") for x in ("piece", "start")))
    np.save(target / "sequence_checksum.npy", np.fromiter(map(of_sequence, sequences), np.uint32))
    index = packed_files.read_index(str(source))
    for name in ("records", "sequences", "tokens"):
        index[name] *= times
    index["files"] = {n: [(target / n).stat().st_size, d] for n, (_, d) in index["files"].items()}
    text = json.dumps({"digest": packed_set._digest_of(index), "index": index})
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
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory() as made:
        base = pathlib.Path(made) / "base"
        packing, rows = build(base), []
        for count in args.records:
            folder = base
            if count > UNIQUE:
                folder = pathlib.Path(made) / str(count)
                repeat(base, folder, count // UNIQUE)
            command = [sys.executable, __file__, "--measure", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            print(rows[-1], flush=True)
            if folder != base:
                shutil.rmtree(folder)
    write(f"{NAME}.json", {"packing": {"records": UNIQUE} | packing, "rows": rows, **environment()})


if __name__ == "__main__":
    main()
