"""A trial that trains nothing: the folder and the output of a run, in a second.

``python stub.py FOLDER VALUES``, a JSON object: ``optim.learning_rate`` says what it does.
"""

import fcntl
import json
import os
import pathlib
import signal
import sys
import time

STEPS, STEP_S = 10, 0.04
FAILS, ALWAYS_LOST, LOST_ONCE_A_STEP, CRASHES = 0.5, 0.75, 0.25, 0.125
"""Learning rates of trials that end otherwise than well."""


def score(rate: float, seed: int) -> float:
    return rate * 10 + seed * seed / 7


def main() -> int:
    folder, values = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    rate, seed = values["optim.learning_rate"], values.get("seed", 0)
    asked_to_stop = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked_to_stop.append(number))
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (folder / "twice").touch()
        return 2
    with (folder / "starts").open("a") as starts:
        starts.write(f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n")
    if rate == FAILS:
        print("a warning\njaxvlm: config.data.train: no such file", flush=True)
        return 2
    if rate == ALWAYS_LOST:
        print("a peer is lost", flush=True)
        return 75
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(exist_ok=True)
    begin = max((int(path.name) for path in checkpoints.iterdir()), default=0)
    with (folder / "metrics.jsonl").open("a") as metrics:
        for step in range(begin + 1, STEPS + 1):
            time.sleep(STEP_S)
            metrics.write(json.dumps({"step": step, "train/loss": 1 / step}) + "\n")
            metrics.flush()
            (checkpoints / str(step)).mkdir()
            if asked_to_stop:
                print(json.dumps({"ended": "preempted"}), flush=True)
                return 0
            if rate == LOST_ONCE_A_STEP and step < STEPS:
                return 75
            if rate == CRASHES and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        metrics.write(json.dumps({"step": STEPS, "eval/exact_match": score(rate, seed)}) + "\n")
    print(json.dumps({"ended": "done", "exact_match": score(rate, seed)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
