"""A packed set beside webdataset, litdata, Grain and datasets: reading, starting, resuming.

    PYTHONPATH=. PEERS/bin/python benchmarks/packed_peers.py [--records 100000 1000000]

PEERS is an environment with jaxvlm, webdataset, litdata, datasets, array_record and torch. All read
the same token ids of conversations of text, shuffled by what each has for it, in one process with
one reading thread, and make batches of about as many records. Ours are whole training batches
(packed sequences with loss masks, positions and segments); the others' are the token ids of their
records, one after another, and nothing else. Every contestant runs in processes of its own, in
turns; figures are medians.

Time to the first batch and of a resume in the middle are from the loader's construction on, imports
apart. webdataset can't resume: it reads up to the middle.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import packed_sets
from benchmarks.common import environment, write

NAME = "packed_peers"
RECORDS = 136
"""Records in a batch: about those of our eight sequences."""
BATCHES = 400
PEERS = ("jaxvlm", "datasets", "grain", "litdata", "webdataset")
SHARD = 50_000  # records in a file of a peer's


def ids_of(folder: pathlib.Path) -> Iterator[np.ndarray]:
    """Token ids of a packed set's records, in their order."""
    tokens, first, last = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "first", "last")
    )
    for begin, end in zip(first.tolist(), last.tolist()):
        yield np.asarray(tokens[begin:end])


def make_datasets(source: pathlib.Path, target: pathlib.Path) -> None:
    import datasets

    rows = ({"input_ids": ids} for ids in ids_of(source))
    features = datasets.Features({"input_ids": datasets.Sequence(datasets.Value("int32"))})
    writer = datasets.arrow_writer.ArrowWriter(path=str(target), features=features)
    for row in rows:
        writer.write(row)
    writer.finalize()


def make_grain(source: pathlib.Path, target: pathlib.Path) -> None:
    from array_record.python import array_record_module

    target.mkdir()
    writer = array_record_module.ArrayRecordWriter(str(target / "0.array_record"), "group_size:1")
    for ids in ids_of(source):
        writer.write(ids.tobytes())
    writer.close()


def make_webdataset(source: pathlib.Path, target: pathlib.Path) -> None:
    import webdataset

    target.mkdir()
    with webdataset.ShardWriter(f"{target}/%05d.tar", maxcount=SHARD, verbose=0) as writer:
        for i, ids in enumerate(ids_of(source)):
            writer.write({"__key__": f"{i:09d}", "ids": ids.tobytes()})


def make_litdata(source: pathlib.Path, target: pathlib.Path) -> None:
    import torch
    from litdata.streaming.cache import Cache

    cache = Cache(str(target), chunk_bytes="64MB")
    for i, ids in enumerate(ids_of(source)):
        cache[i] = torch.from_numpy(ids.copy())
    cache.done()
    cache.merge()


def jaxvlm(folder: str, part: float) -> Iterator[int]:
    from jaxvlm.data.conversations.dataset import load_dataset
    from jaxvlm.data.tokenizer import chat_tokenizer

    tokenizer = chat_tokenizer.load(f"{folder}/tokenizer")
    data = load_dataset(packed_sets.config(), tokenizer, image_size=8, num_patches=4, spec=folder)
    batches = data.train(np.arange(packed_sets.ROWS), int(part * data.steps_per_epoch))
    for _, meta in batches:
        yield len(meta.record)


def with_datasets(folder: str, part: float) -> Iterator[int]:
    import datasets

    data = datasets.Dataset.from_file(folder).with_format("numpy").shuffle(seed=0)
    for start in range(int(part * len(data)), len(data) - RECORDS, RECORDS):
        yield joined(data[start : start + RECORDS]["input_ids"])


def with_grain(folder: str, part: float) -> Iterator[int]:
    import grain

    source = grain.sources.ArrayRecordDataSource(f"{folder}/0.array_record")
    data = grain.MapDataset.source(source).shuffle(seed=0)
    data = data.map(lambda record: np.frombuffer(record, np.int32))
    batches = data.batch(RECORDS, batch_fn=list)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    first = int(part * len(batches))
    for batch in batches[first:].to_iter_dataset(options):
        yield joined(batch)


def with_webdataset(folder: str, part: float) -> Iterator[int]:
    import webdataset

    shards = sorted(map(str, pathlib.Path(folder).glob("*.tar")))
    total = int((pathlib.Path(folder) / "count").read_text())
    data = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0).shuffle(1000, seed=0)
    batch, skipped = [], int(part * total)
    for i, sample in enumerate(data):
        if i < skipped:
            continue
        batch.append(np.frombuffer(sample["ids"], np.int32))
        if len(batch) == RECORDS:
            yield joined(batch)
            batch = []


def with_litdata(folder: str, part: float) -> Iterator[int]:
    import litdata

    data = litdata.StreamingDataset(folder, shuffle=True, seed=0)
    loader = litdata.StreamingDataLoader(
        data, batch_size=RECORDS, num_workers=0, collate_fn=lambda batch: batch
    )
    if part:
        next(iter(loader))  # it has a state once it was read
        done = int(part * len(data)) // RECORDS * RECORDS
        state = loader.state_dict() | {"num_samples_yielded": done}
        loader.load_state_dict(state | {"dataset": data.state_dict(done, 0, RECORDS)})
    for batch in loader:
        yield joined([ids.numpy() for ids in batch])


def joined(records: Any) -> int:
    """Put a batch's token ids one after another, with their lengths."""
    np.cumsum([len(ids) for ids in records])
    np.concatenate(records)
    return len(records)


def measure(name: str, folder: str) -> dict[str, float]:
    """One contestant's figures, in a process of its own."""
    read: Callable[[str, float], Iterator[int]] = {
        "jaxvlm": jaxvlm, "datasets": with_datasets, "grain": with_grain,
        "litdata": with_litdata, "webdataset": with_webdataset,
    }[name]  # fmt: skip
    next(read(folder, 0))  # imports, and files in the system's cache
    before = packed_sets.anonymous_mib()
    began = time.perf_counter()
    batches = read(folder, 0)
    next(batches)
    first = time.perf_counter() - began
    wall, cpu = time.perf_counter(), time.process_time()
    records = sum(next(batches) for _ in range(BATCHES))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    memory = packed_sets.anonymous_mib() - before
    began = time.perf_counter()
    next(read(folder, 0.5))
    return {
        "first_batch_s": first,
        "resume_s": time.perf_counter() - began,
        "records_per_s": records / wall,
        "records_per_cpu_s": records / cpu,
        "anonymous_mib": memory,
    }


def compare(folder: pathlib.Path, count: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of all contestants on a set of so many records."""
    base = folder / "base"
    ours = folder / f"jaxvlm-{count}"
    packed_sets.repeat(base, ours, count // packed_sets.UNIQUE)
    makers = {
        "datasets": make_datasets, "grain": make_grain,
        "litdata": make_litdata, "webdataset": make_webdataset,
    }  # fmt: skip
    for name, make in makers.items():
        make(ours, folder / f"{name}-{count}")
    (folder / f"webdataset-{count}" / "count").write_text(str(count))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS}
    for _ in range(rounds):
        for name in PEERS:
            command = [sys.executable, __file__, "--one", name, str(folder / f"{name}-{count}")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    rows = []
    for name, each in found.items():
        middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
        rows.append(
            {"records": count, "name": name} | {k: float(f"{v:.3g}") for k, v in middle.items()}
        )
        print(rows[-1], flush=True)
    for path in folder.glob(f"*-{count}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, nargs="+", default=[10**5, 10**6])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2, help="a contestant and its files")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        packed_sets.write_records(folder / "records.jsonl", packed_sets.UNIQUE)
        packed_sets.pack(str(folder / "records.jsonl"), str(folder / "base"))
        rows = [row for count in args.records for row in compare(folder, count, args.rounds)]
    versions = {name: importlib.metadata.version(name) for name in PEERS}
    write(f"{NAME}.json", {"rows": rows, "peers": versions, **environment()})


if __name__ == "__main__":
    main()
