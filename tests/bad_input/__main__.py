"""`python -m tests.bad_input --count=2000 --json=FILE`: many bad inputs, and what came of them."""

from __future__ import annotations

import argparse
import json
import sys

from tests.bad_input import runner

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2_000, help="How many inputs, about.")
    parser.add_argument("--seed", type=int, default=0, help="Other inputs for another seed.")
    parser.add_argument("--workers", type=int, default=2, help="Processes at a time.")
    parser.add_argument("--json", default="", help="File for the counts and the bad cases.")
    parser.add_argument("--source", default="", help="Folder with the sources of another commit.")
    parser.add_argument("--names", default="", help="JSON file with the settings' names there.")
    parser.add_argument("--kinds", nargs="*", default=list(runner.KINDS), help="Kinds of inputs.")
    given = parser.parse_args()
    asked = runner.Asked(given.source, given.names)
    found = runner.outcomes(given.count, given.seed, given.workers, asked, given.kinds)
    if given.json:
        runner.write(given.json, found)
    print(json.dumps(runner.summary(found), indent=2))
    sys.exit(any(outcome.what not in runner.FINE for outcome in found))
