"""Where the vision tower is: split like the rest, whole on every device, or on some of its own."""

from __future__ import annotations

import dataclasses

from jaxvlm.build.shares import best_first
from jaxvlm.config import DualConfig
from jaxvlm.plan import parts
from jaxvlm.plan.machine import Machine
from jaxvlm.plan.memory import Setup
from jaxvlm.plan.time import StepTime, step_time
from jaxvlm.plan.ways import Way
from jaxvlm.train.apart import Sides


def with_whole_tower(way: Way) -> Way | None:
    """The way with the tower's parameters whole on every device; ``None``: they are that already.

    See ``config.strategy.whole``: moments and gradients are split as before.
    """
    if not way.strategy.params or "vision" in way.strategy.whole:
        return None
    whole = (*way.strategy.whole, "vision")
    return way._replace(strategy=dataclasses.replace(way.strategy, whole=whole))


def apart(setup: Setup, time: StepTime, machine: Machine) -> tuple[int, float] | None:
    """About how long a step takes with the tower on devices of its own (``config.tower.devices``).

    Args:
        setup: of a step with the tower on all devices.
        time: of the same.
        machine: its.

    Returns:
        Devices of the tower and seconds of a step, which is as long as the side that has more work
        for each of its devices, so never shorter than with the tower on all of them; ``None`` with
        more than one host, and of pairs and dual encoders. What the tower sends is not counted, for
        it runs ahead; whether dims and rows of both sides are divisible the run finds out.
    """
    devices, tower = machine.devices, time.parts.get("vision", 0.0)
    if setup.pairs or isinstance(setup.config, DualConfig) or not tower:
        return None
    if devices == 1 or devices > machine.a_host:
        return None
    rest = time.total - tower
    learned = parts.learned_of(setup).get("vision")
    if learned and (learned.own or learned.adapted):  # the backward pass encodes again
        still = setup._replace(frozen=("*",))
        tower += step_time(still, machine).parts.get("vision", 0.0)
    counts = best_first(Sides(tower, rest), devices)
    n = next(n for n in counts if setup.rows % (devices - n) == 0)  # one device takes any rows
    return n, devices * max(tower / n, rest / (devices - n))
