"""easy-VQA as JSONL with files, Parquet with bytes, tars, a packed set and one behind a web server.

    PYTHONPATH=. python benchmarks/stored_formats.py [--epochs 12]

Writes easy-VQA in each format, trains configs/quickstart.py on it by the README's command, and
evaluates on the test split in the same format (for packed sets, on the JSONL). Written down for
each: the final exact match, the share of time in which steps waited for data, and a digest of all
parameters, which is one and the same if all formats give the same batches.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import http.server
import io
import itertools
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import threading
from typing import Any

import numpy as np

import jaxvlm
from benchmarks.common import ROOT, environment, write
from jaxvlm.config import DataConfig
from jaxvlm.data.sources import conversation_formats

RECIPE = f"--config={ROOT / 'configs' / 'quickstart.py'}"
SPLITS = ("train", "test")
SHARD = 5_000  # records in a tar, about


def rows_of(split: str) -> list[dict[str, Any]]:
    """Questions and answers of a split, with the image's file."""
    records, _ = conversation_formats.read(f"easy-vqa:{split}", DataConfig())
    return [
        {
            "id": str(i),
            "question": record.turns[0].content.removeprefix("<image>"),
            "answer": record.turns[1].content,
            "image": record.images[0],
        }
        for i, record in enumerate(records)
    ]


def write_jsonl(rows: list[dict[str, Any]], target: pathlib.Path) -> str:
    """A line for each question; images stay in their own files."""
    target.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(target.with_suffix(".jsonl"))


def write_parquet(rows: list[dict[str, Any]], target: pathlib.Path) -> str:
    """A row for each question, with its image's bytes."""
    import pyarrow
    import pyarrow.parquet

    content = functools.cache(lambda path: pathlib.Path(path).read_bytes())
    table = pyarrow.Table.from_pylist(
        [row | {"image": {"bytes": content(row["image"]), "path": None}} for row in rows]
    )
    pyarrow.parquet.write_table(table, target.with_suffix(".parquet"), row_group_size=2_000)
    return str(target.with_suffix(".parquet"))


def write_tars(rows: list[dict[str, Any]], target: pathlib.Path) -> str:
    """A sample for each question; the first of an image has it, and the others name it."""
    target.mkdir()
    rows_of_tar: list[list[dict[str, Any]]] = [[]]
    for _, group in itertools.groupby(rows, lambda row: row["image"]):
        if len(rows_of_tar[-1]) >= SHARD:  # all questions of an image are in one tar
            rows_of_tar.append([])
        rows_of_tar[-1] += group
    for number, own in enumerate(rows_of_tar):
        first: dict[str, str] = {}  # of each tar
        with tarfile.open(target / f"{number:03d}.tar", "w") as tar:

            def add(name: str, data: bytes, tar: tarfile.TarFile = tar) -> None:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))

            for row in own:
                key, path = f"{int(row['id']):06d}", row["image"]
                if path not in first:
                    first[path] = f"{key}.png"
                    add(f"{key}.png", pathlib.Path(path).read_bytes())
                add(f"{key}.json", json.dumps(row | {"image": first[path]}).encode())
    return str(target / "*.tar")


def trained(workdir: pathlib.Path, train: str, test: str, epochs: float) -> dict[str, Any]:
    """Train by the README's command; returns the scores and the parameters' digest."""
    command = [sys.executable, "-m", "jaxvlm", "train", RECIPE, f"--workdir={workdir}", "--json"]
    command += [f"--config.data.train={train}", f"--config.data.eval={test}"]
    command += [f"--config.epochs={epochs}", f"--config.data.download_dir={workdir}/copies"]
    if "://" not in train:
        command.pop()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in sorted(jaxvlm.load(workdir).params.items()):
        digest.update(name.encode() + np.asarray(leaf).tobytes())
    lines = (workdir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "train/wait_share" in row]
    waited = sum(row["train/seconds"] * row["train/wait_share"] for row in rows)
    share = {"wait_share": waited / sum(row["train/seconds"] for row in rows)}
    names = ("step", "exact_match", "blind/exact_match", "loss", "skipped_records")
    found = {name: result[name] for name in names} | share
    return found | {"parameters": digest.hexdigest()}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=float, default=12.0)
    parser.add_argument("--output", default="stored_formats.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        rows = {split: rows_of(split) for split in SPLITS}
        makers = {"jsonl": write_jsonl, "parquet": write_parquet, "tar": write_tars}
        specs = {
            name: [make(rows[split], folder / f"{name}-{split}") for split in SPLITS]
            for name, make in makers.items()
        }
        train, test = specs["jsonl"]
        pack = [sys.executable, "-m", "jaxvlm", "data", "pack", RECIPE, f"--output={folder}/set"]
        subprocess.run([*pack, f"--config.data.train={train}"], check=True)
        specs["packed"] = [str(folder / "set"), test]
        serve = functools.partial(Quiet, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            specs["http"] = [f"http://127.0.0.1:{server.server_port}/set", test]
            found = {}
            for name, (train, test) in specs.items():
                found[name] = trained(folder / f"run-{name}", train, test, args.epochs)
                print(name, found[name], flush=True)
            server.shutdown()
    same = len({row["parameters"] for row in found.values()}) == 1
    write(
        args.output,
        {"epochs": args.epochs, "formats": found, "same_parameters": same, **environment()},
    )


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A web server of a folder that answers requests for parts of files, and logs none."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        """Answer a request for a file or for a part of it."""
        file = pathlib.Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(404)
            return
        data = file.read_bytes()
        part = self.headers.get("Range", "").removeprefix("bytes=").split("-")
        if len(part) == 2:
            data = data[int(part[0]) : int(part[1]) + 1]
        self.send_response(206 if len(part) == 2 else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    main()
