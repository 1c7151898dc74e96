"""Seconds a round over Flower's real processes on this machine, with TLS and node keys.

    python -m benchmarks.flower_transport --megabytes=100 --rounds=3 --json=FILE

A SuperLink, two SuperNodes, the coordinator and two sites that train nothing. Needs the packages
of the extra [test].
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import sys
import tempfile
import time

from benchmarks.common import environment

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests"))

from federate.flower_stack import HERE, Stack


def measured(megabytes: float, rounds: int) -> dict:
    """Seconds until the first version and of each later one, and bytes by site."""
    script = str(HERE / "flower_site.py")
    sites = {
        name: [
            sys.executable, script, name, "{socket}", "{folder}.safetensors", str(rounds), "0",
            str(megabytes),
        ]
        for name in ("a", "b")
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="jf-") as folder:
        more = [f"--config.federate.rounds={rounds}"]
        with Stack(pathlib.Path(folder), sites, more=more) as stack:
            at = [time.monotonic()]
            stack.begin()
            for version in range(1, rounds + 1):
                stack.wait(lambda version=version: stack.version() >= version, 1200)
                at.append(time.monotonic())
            stack.finish()
            table = pathlib.Path(folder) / "coordinator" / "table.json"
            sent = json.loads(table.read_text())["bytes"]
    seconds = [b - a for a, b in itertools.pairwise(at)]
    return {
        "megabytes": megabytes,
        "start_to_version_1_s": seconds[0],
        "round_s": seconds[1:],
        "bytes_sent_and_received": sent,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0, 100.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="File for the figures.")
    given = parser.parse_args()
    document = {
        "environment": environment(),
        "runs": [measured(size, given.rounds) for size in given.megabytes],
    }
    print(json.dumps(document, indent=1))
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(document, indent=1) + "\n")
