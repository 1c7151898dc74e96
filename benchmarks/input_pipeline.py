"""Images a second and core, from JPEG files to a batch on the device, against torch.

    PYTHONPATH=. python benchmarks/input_pipeline.py

Ours: :class:`jaxvlm.data.conversations.dataset.Dataset` (decode, resize, hash, pack) and
``device_put``, its
memory of decoded images off. Torch's: ``DataLoader`` over PIL with the same resize (bicubic,
to a square), uint8 tensors collated. Both read ahead with one worker. PIL's ``draft`` (a JPEG
decoded at a fraction where that is still large enough) is part of ours, so torch is measured
without it and with it. Rates are a second of wall time, and a second of CPU time of all
processes: a core's.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable

import numpy as np
from PIL import Image

from benchmarks.common import environment, write

SIZE = 224


def make_images(folder: pathlib.Path, count: int, width: int, height: int) -> list[str]:
    """JPEGs of smooth colours with noise: about a photograph's bytes."""
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        small = rng.integers(0, 256, (24, 32, 3), np.uint8)
        image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(image, np.int16) + rng.integers(-6, 7, (height, width, 1))
        path = folder / f"{i}.jpg"
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(path, quality=88)
        paths.append(str(path))
    return paths


def ours(folder: pathlib.Path, paths: list[str], batch_size: int) -> Callable[[], int]:
    """A pass of our loader over all images."""
    import jax

    from jaxvlm.config import Config, DataConfig
    from jaxvlm.data.conversations import tokenize
    from jaxvlm.data.conversations.dataset import load_dataset
    from jaxvlm.data.sources import conversation_formats
    from jaxvlm.hf.run_processor import make_tokenizer

    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "noise"}]
    records = [{"id": str(i), "image": p, "conversations": turns} for i, p in enumerate(paths)]
    file = folder / "records.json"
    file.write_text(json.dumps(records))
    config = DataConfig(
        train=str(file),
        batch_size=batch_size,
        max_length=64,
        max_images_per_sequence=1,
        packing=False,
        image_cache_mb=0,
        workers=1,
    )
    read = conversation_formats.read(str(file), config)
    tokenizer = make_tokenizer(Config(), None, lambda: tokenize.texts(read[0]))
    dataset = load_dataset(config, tokenizer, image_size=SIZE, num_patches=16, read=read)
    rows = np.arange(batch_size)

    def run() -> int:
        images = 0
        for batch, _ in dataset.eval(rows, batch_size):
            jax.block_until_ready(jax.device_put(batch))
            images += int((batch.image_start >= 0).sum())
        return images

    return run


class Files:
    """A torch dataset of images."""

    def __init__(self, paths: list[str], draft: bool):
        self.paths, self.draft = paths, draft

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> np.ndarray:
        with Image.open(self.paths[index]) as image:
            if self.draft:
                image.draft("RGB", (2 * SIZE, 2 * SIZE))
            rgb = image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
            return np.array(rgb)


def cpu_seconds() -> float:
    """Used so far by this process and by the processes it has started and that live."""
    ticks = os.sysconf("SC_CLK_TCK")
    mine = os.getpid()
    total = time.process_time()
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == mine:
            total += (int(fields[11]) + int(fields[12])) / ticks
    return total


def torchs(paths: list[str], batch_size: int, draft: bool) -> Callable[[], int]:
    """A pass of torch's DataLoader over all images."""
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    files: Iterable = Files(paths, draft)
    loader = DataLoader(files, batch_size, num_workers=1, persistent_workers=True)

    def run() -> int:
        return sum(len(batch) for batch in loader)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", default="input_pipeline_cpu.json", help='"" writes nothing')
    args = parser.parse_args()
    result: dict = {"environment": environment(), "settings": vars(args), "rate": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        paths = make_images(folder, args.images, args.width, args.height)
        size = statistics.mean(pathlib.Path(p).stat().st_size for p in paths)
        result["mean_file_bytes"] = round(size)
        runs = {
            "torch DataLoader": torchs(paths, args.batch_size, draft=False),
            "torch DataLoader + draft": torchs(paths, args.batch_size, draft=True),
            "jaxvlm": ours(folder, paths, args.batch_size),
        }
        rates: dict[str, list[float]] = {who: [] for who in runs}
        per_core: dict[str, list[float]] = {who: [] for who in runs}
        for run in runs.values():  # files in the page cache, workers started
            run()
        for _ in range(args.rounds):
            for who, run in runs.items():
                start, cpu = time.perf_counter(), cpu_seconds()
                count = run()
                rates[who].append(count / (time.perf_counter() - start))
                per_core[who].append(count / (cpu_seconds() - cpu))
                assert count == args.images, (who, count)
    for who, values in rates.items():
        result["rate"][who] = {
            "images_per_s_best": round(max(values), 1),
            "images_per_s_median": round(statistics.median(values), 1),
            "images_per_cpu_s_best": round(max(per_core[who]), 1),
            "images_per_cpu_s_median": round(statistics.median(per_core[who]), 1),
        }
        print(f"{who:<28} {result['rate'][who]}")
    result["ours_to"] = {
        who: {figure: round(result["rate"]["jaxvlm"][figure] / rate[figure], 3) for figure in rate}
        for who, rate in result["rate"].items()
        if who != "jaxvlm"
    }
    for who, ratio in result["ours_to"].items():
        print(f"ours to {who}: {ratio}  (target 1.0)")
    if args.output:
        write(args.output, result)


if __name__ == "__main__":
    main()
