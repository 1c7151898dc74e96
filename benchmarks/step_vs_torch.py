"""A train step of LLaVA in jaxvlm against transformers in torch, on this CPU, in float32.

    PYTHONPATH=. python benchmarks/step_vs_torch.py

Same architecture, same weights, same records; forward, backward, AdamW. Each contestant lives in
a process of its own with the same number of threads, and they take turns (ABAB...).
Wall time and CPU time are both given: on a machine that others use too, CPU time with one thread
is the steadier figure.

``padded``: one batch of padded rows, the same for all. Target: ours at 0.9x of torch's rate.
``mix``: easy-VQA's training records. Torch gets them grouped by length, in batches of at most
the tokens of our packed batch; ours are packed by jaxvlm.data, with and without the sharing of
images. Rates are in records/s and in the records' own tokens/s, the same tokens for all:
a record's image and text, padding left out. Target: 1.5x.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile

from benchmarks import prepare
from benchmarks.common import Worker, environment, summary, write

OURS, EAGER, COMPILE = "jaxvlm", "torch eager", "torch.compile"


def contestants(
    folder: pathlib.Path, ours: dict[str, str], theirs: str, threads: int = 2
) -> dict[str, Worker]:
    """Start them one after another, so that start-to-first-step is measured alone."""
    started = {}
    for name, case in ours.items():
        started[name] = Worker(name, "jax_step.py", str(folder), case, threads=threads)
    for name, mode in ((EAGER, "eager"), (COMPILE, "compile")):
        started[name] = Worker(name, "torch_step.py", str(folder), theirs, mode, threads=threads)
    for name, worker in started.items():
        print(
            f"  {name:<28} start to first step {worker.start_to_first_step:6.1f} s "
            f"(imports {worker.ready['import_s']:.1f} s, first step with its compilation "
            f"{worker.ready['compile_s']:.1f} s), loss {worker.ready['loss']:.6f}"
        )
    return started


def take_turns(workers: dict[str, Worker], rounds: int, steps: dict[str, int]) -> dict[str, list]:
    """Each in turn, ``rounds`` times; the seconds of each one's steps, round by round."""
    for name, worker in workers.items():
        worker.ask(str(steps[name]))  # every shape compiled, caches warm
    turns: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            turns[name].append(worker.ask(str(steps[name]))["seconds"])
    return turns


def starts(workers: dict[str, Worker]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "start_to_first_step_s": round(worker.start_to_first_step, 2),
            "import_s": round(worker.ready["import_s"], 2),
            "first_step_with_compilation_s": round(worker.ready["compile_s"], 2),
        }
        for name, worker in workers.items()
    }


def padded(folder: pathlib.Path, rounds: int, steps: int, threads: int) -> dict:
    print(f"padded step, threads: {threads}")
    dims = prepare.padded(folder)
    workers = contestants(folder, {OURS: "padded_jax"}, "padded_torch", threads)
    losses = [worker.ready["loss"] for worker in workers.values()]
    assert max(losses) - min(losses) < 1e-4 * max(losses), losses
    turns = take_turns(workers, rounds, dict.fromkeys(workers, steps))
    result: dict = {
        "threads": threads,
        "dims": dims,
        "start": starts(workers),
        "step": {},
        "ours_to": {},
    }
    for name, worker in workers.items():
        worker.close()
        result["step"][name] = summary([s for turn in turns[name] for s in turn])
        print(f"  {name:<28} {result['step'][name]}")
    for peer in (EAGER, COMPILE):
        result["ours_to"][peer] = {
            figure: round(result["step"][peer][figure] / result["step"][OURS][figure], 3)
            for figure in ("min_ms", "median_ms", "cpu_min_ms", "cpu_median_ms")
        }
        print(f"  ours to {peer}: {result['ours_to'][peer]}  (target 0.9)")
    start = result["start"]
    ratio = start[OURS]["start_to_first_step_s"] / start[COMPILE]["start_to_first_step_s"]
    result["start_to_first_step_ours_over_compile"] = round(ratio, 3)
    print(f"  start to first step: {ratio:.2f} of torch.compile's  (target 0.5)")
    return result


def mix(folder: pathlib.Path, rounds: int, dims_name: str) -> dict:
    print(f"easy-VQA's mix of lengths, {dims_name} dims:")
    dims, counts = prepare.mix(folder, dims_name)
    shared, packed = f"{OURS}, images shared", f"{OURS}, packed"
    workers = contestants(folder, {shared: "mix_shared", packed: "mix_packed"}, "mix_torch")
    case = {shared: "mix_shared", packed: "mix_packed", EAGER: "mix_torch", COMPILE: "mix_torch"}
    steps = {name: counts[case[name]]["batches"] for name in workers}
    turns = take_turns(workers, rounds, steps)
    result: dict = {"dims": dims, "data": counts, "start": starts(workers), "rate": {}}
    for name, worker in workers.items():
        worker.close()
        had = counts[case[name]]
        totals = sorted(sum(wall for wall, _ in turn) for turn in turns[name])
        cpu = statistics.median(sum(cpu for _, cpu in turn) for turn in turns[name])
        best, median = totals[0], statistics.median(totals)
        result["rate"][name] = {
            "record_tokens_per_s_best": round(had["record_tokens"] / best),
            "record_tokens_per_s_median": round(had["record_tokens"] / median),
            "record_tokens_per_cpu_s": round(had["record_tokens"] / cpu),
            "records_per_s_median": round(had["records"] / median, 1),
            "processed_tokens_per_s_median": round(had["processed_tokens"] / median),
        }
        print(f"  {name:<28} {result['rate'][name]}")
    result["ours_to"] = {}
    for ours in (shared, packed):
        for peer in (EAGER, COMPILE):
            result["ours_to"][f"{ours} / {peer}"] = {
                figure: round(result["rate"][ours][figure] / result["rate"][peer][figure], 3)
                for figure in (
                    "record_tokens_per_s_best",
                    "record_tokens_per_s_median",
                    "record_tokens_per_cpu_s",
                )
            }
    for name, ratio in result["ours_to"].items():
        print(f"  {name:<48} {ratio}  (target 1.5)")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of the padded step, a turn")
    parser.add_argument("--only", default="", help="one of the parts")
    args = parser.parse_args()
    result: dict = {"environment": environment()}
    for name in ("padded", "padded-1-thread", "mix-small", "mix-quickstart"):
        if args.only in ("", name):
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder)
                if name.startswith("padded"):
                    threads = 1 if name.endswith("1-thread") else 2
                    result[name] = padded(path, args.rounds, args.steps, threads)
                else:
                    result[name] = mix(path, args.rounds, name.removeprefix("mix-"))
        result["environment"]["load_average_at_end"] = os.getloadavg()[0]
    if not args.only:
        write("step_vs_torch_cpu.json", result)


if __name__ == "__main__":
    main()
