"""`python -m tests.kills --json=FILE`: sixty kills at drawn moments, and what came of them.

The file is written after each kind of run, and the kinds that are in it are not run again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile

from benchmarks.common import environment
from tests.kills import runner

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="Other moments for another seed.")
    parser.add_argument("--kinds", nargs="+", default=runner.KINDS, choices=runner.KINDS)
    parser.add_argument("--json", required=True, help="File for the counts and every kill.")
    given = parser.parse_args()
    file = pathlib.Path(given.json)
    found = json.loads(file.read_text()) if file.exists() else {"every": [], "differ": {}}
    kills = [runner.Kill(*row) for row in found["every"]]
    differ, machine = found["differ"], environment()
    for kind in given.kinds:
        if kind in {kill.kind for kill in kills}:
            continue
        with tempfile.TemporaryDirectory() as name:
            made, found_here = runner.every(kind, pathlib.Path(name) / "runs", given.seed)
        kills += made
        if found_here:
            differ[kind] = found_here
        document = {"environment": machine, "seed": given.seed, **runner.summary(kills)}
        document |= {"differ": differ, "fields": runner.Kill._fields}
        lines = ",\n".join(f"  {json.dumps(kill)}" for kill in kills)  # a line a kill
        head = json.dumps(document, indent=1).removesuffix("\n}")
        file.write_text(f'{head},\n "every": [\n{lines}\n ]\n}}\n')
    print(json.dumps(runner.summary(kills) | {"differ": differ}, indent=1))
    sys.exit(bool(differ))
