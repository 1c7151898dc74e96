"""The planner's choice beside what authors of published set-ups did.

    python -m benchmarks.planner_choice [--only ID ...]
    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu python -m benchmarks.planner_choice --verify ID ...

Each set-up of ``published_setups.json`` is asked with its authors' model, chips and batch. Two ways
are *the same* where the preset is (DDP = ``ddp``, ZeRO-1 = ``zero1``, ZeRO-2 = ``zero2``, ZeRO-3
and FSDP = ``fsdp``, FSDP in groups = ``hybrid_shard``) and the same further axes (tensor, context,
experts, stages) are used; sizes of axes, remat and microbatches may differ. Where neither the first
nor the second choice is theirs, the authors' own mesh is planned with the remat that is nearest to
theirs; where that does not fit here (parameters are float32, frozen ones too), the fastest way of
the same kind that does. The times are compared. Kept visual tokens are no choice: authors had none.

``--verify`` compiles the first choice and the authors' way ahead of time, and times what the
compiler sends: see ``roofline``.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks import setups
from benchmarks.common import environment, kept, write
from jaxvlm.config import ConfigError
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.request.request import PlanRequest
from jaxvlm.planner.search import candidate_memory, search
from jaxvlm.planner.search.candidate_memory import Memory, Plan
from jaxvlm.planner.search.candidates import Candidate, setup_of
from jaxvlm.planner.time import communication

NAME = "planner_choice"
_SHOWN = 3
GOOD = ("first", "second", "faster")
"""Verdicts that say that the planner chose well."""


def chosen(row: dict[str, Any]) -> dict[str, Any]:
    """What the planner says of a set-up, as plain values.

    Args:
        row: see :mod:`benchmarks.setups`.

    Returns:
        ``choices`` (the fastest that fit), ``theirs``, ``verdict`` and what it stands on.
    """
    start = time.process_time()
    found: dict[str, Any] = {"id": row["id"]}
    try:
        asked = setups.question_of(row)
        result = search.search(asked, 5, lambda way: way.cache == "off")
    except (ConfigError, ValueError, OverflowError) as error:  # the last two are its own mistakes
        kind = "refused" if isinstance(error, ConfigError) else "broken"
        return found | {"verdict": kind, "why": str(error).split(";")[0]}
    found["choices"] = [said(plan, asked) for plan in result.best[:_SHOWN]]
    if result.nearest:
        found["nearest"] = said(result.nearest, asked)
    way = setups.theirs(row)
    found["theirs"] = own(way, asked)
    found["rank"] = next(
        (i for i, plan in enumerate(result.best, 1) if plan.candidate.family == way.family), 0
    )
    if found["rank"] not in (1, 2) and not found["theirs"].get("fits"):
        same = search.search(asked, 1, lambda w: w.cache == "off" and w.family == way.family)
        found["theirs_best"] = said(same.best[0], asked) if same.best else None
    found["verdict"] = verdict(found)
    if "measured" in row and "seconds" in found["theirs"]:
        found["measured_seconds"] = round(measured(row, asked, way), 3)
    found["notes"] = result.notes
    found["compared"] = len(result.considered)
    found["planned_in_cpu_seconds"] = round(time.process_time() - start, 1)
    return found


def said(plan: Plan, asked: PlanRequest) -> dict[str, Any]:
    """A plan in few words."""
    return {
        "family": plan.candidate.family,
        "way": plan.candidate.text(),
        "seconds": round(plan.time.total, 3),
        "mfu": round(plan.time.mfu, 3),
        "gib": round(plan.peak / 2**30, 1),
        "traced": plan.traced,
        "fits": plan.peak <= search.capacity(asked),
    }


def own(way: Candidate, asked: PlanRequest) -> dict[str, Any]:
    """The authors' way: its plan, or why it can't be run here."""
    named = {"family": way.family, "way": way.text()}
    try:
        setups.parts(way, asked)
        plan = Memory(asked).plan(way, candidate_memory.time_of(asked, way))
    except ConfigError as error:
        return named | {"why": str(error)}
    return said(plan, asked)


def verdict(found: dict[str, Any]) -> str:
    """first | second | faster | theirs does not fit | theirs can't be planned | slower |
    nothing fits."""
    if not found["choices"]:
        return "nothing fits"
    if found["rank"] in (1, 2):
        return ("first", "second")[found["rank"] - 1]
    theirs = found["theirs"] if found["theirs"].get("fits") else found.get("theirs_best")
    if theirs is None:
        return "theirs can't be planned" if "why" in found["theirs"] else "theirs does not fit"
    return "faster" if found["choices"][0]["seconds"] < theirs["seconds"] else "slower"


def measured(row: dict[str, Any], asked: PlanRequest, way: Candidate) -> float:
    """Seconds of a step that its authors measured."""
    kind, value = next(iter(row["measured"].items()))
    if kind == "seconds":
        return float(value)
    devices = asked.machine.devices
    if kind == "tokens_per_s_a_device":
        return asked.rows * asked.length / devices / float(value)
    return candidate_memory.time_of(asked, way).model_flops / devices / (float(value) * 1e12)


def verified(row: dict[str, Any]) -> dict[str, Any]:
    """The first choice and the authors' way, as compilers have them."""
    from jaxvlm.planner.compiled import verify

    asked = setups.question_of(row)
    verify.prepare(asked.machine)
    devices = verify.devices_of(asked.machine)
    result = search.search(asked, 1, lambda way: way.cache == "off")
    first = result.best[0] if result.best else result.nearest
    assert first is not None, row["id"]
    ways = {"ours": first.candidate, "theirs": setups.theirs(row)}
    made: dict[str, Any] = {}
    for who, way in ways.items():
        made[who] = {"way": way.text()}
        try:
            one = verify.compiled(setup_of(asked, way), devices)
        except ConfigError as error:  # dims that the mesh does not divide
            one = {"why": str(error)}
        if "why" in one:
            made[who]["why"] = one["why"].splitlines()[0][:300]
            continue
        work = candidate_memory.time_of(asked, way)
        least, most = roofline(work.compute + work.hbm, one["sent"], way, asked.machine)
        made[who] |= {
            "gib": round(one["memory"]["peak"] / 2**30, 1),
            "at_least": round(least, 3),
            "at_most": round(most, 3),
            "cpu_seconds": one["seconds"],
        }
    return made


def roofline(work: float, sent: Any, way: Candidate, there: Machine) -> tuple[float, float]:
    """(everything sent hides behind the work, nothing does): seconds of a step.

    Args:
        work: seconds of matmuls and of memory.
        sent: collectives of the compiled program, see ``jaxvlm.planner.compiled.collectives``.
        way: whose mesh it is.
        there: rates.
    """
    links = network = 0.0
    for one in sent:
        axes = one.axes or tuple(a for a in communication.AXES if getattr(way.mesh, a) > 1)
        # ``bytes`` of a permute are what is sent
        fast, slow = communication.seconds(
            communication.Message("permute", axes, "", float(one.wire_bytes), 1.0, False),
            way.mesh,
            there,
        )
        links, network = links + fast, network + slow
    return max(work, links, network), work + max(links, network)


def summary(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How often each verdict was given."""
    kinds = [row["verdict"] for row in rows]
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} | {"of": len(rows)}


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "choices" not in row:
        return f"{row['id']}: {row['verdict']}: {row['why']}"
    nothing = {"way": "-", "seconds": 0}
    first = row["choices"][0] if row["choices"] else row.get("nearest", nothing)
    theirs = row["theirs"]
    needs = theirs.get("why", f"{theirs.get('seconds')} s, {theirs.get('gib')} GiB")
    if row.get("theirs_best"):
        needs += f"; at best {row['theirs_best']['way']}, {row['theirs_best']['seconds']} s"
    real = f"; measured {row['measured_seconds']} s" if "measured_seconds" in row else ""
    return (
        f"{row['id']}: {row['verdict']}: {first['way']} ({first['seconds']} s); "
        f"theirs: {theirs['way']} ({needs}{real})"
    )


def table(rows: list[dict[str, Any]]) -> list[str]:
    """The rows of the page docs/planning_choice.md."""
    heads = ("setup", "authors", "first choice", "second", "verdict")
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for row in rows:
        if "choices" not in row:
            lines.append(f"| {row['id']} | | | | {row['verdict']} |")
            continue
        first, second = (*(short(plan) for plan in row["choices"][:2]), "none", "none")[:2]
        theirs = short(row["theirs"])
        lines.append(f"| {row['id']} | {theirs} | {first} | {second} | {row['verdict']} |")
    return lines


def short(plan: dict[str, Any]) -> str:
    """A way without remat and microbatches, and its seconds where it fits."""
    words = [w for w in plan["way"].split() if not w.startswith(("remat=", "microbatches="))]
    if plan.get("fits"):
        words.append(f"{plan['seconds']:.3g} s")
    return " ".join(words)


def main() -> None:
    """Ask for each set-up, or compile some."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=[], help="ids; rows of others are kept")
    parser.add_argument("--verify", nargs="*", default=[], help="ids to compile; others are kept")
    parser.add_argument("--table", action="store_true", help="print the kept rows as Markdown")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table(kept(NAME))))
        return
    old = {row["id"]: row for row in kept(NAME)}
    rows = []
    for row in setups.load():
        one = old.get(row["id"], {})
        if row["id"] in args.verify:
            one["verified"] = verified(row)
            print(row["id"], one["verified"], flush=True)
        elif not args.verify and (not args.only or row["id"] in args.only):
            more = {k: one[k] for k in ("verified",) if k in one}
            one = chosen(row) | more
            print(line(one), flush=True)
        rows.append(one)
    result = {"summary": summary(rows), "environment": environment(), "rows": rows}
    write(f"{NAME}.json", result)
    print(result["summary"])


if __name__ == "__main__":
    main()
