"""Placement of the vision encoder: sharded like the rest, replicated, or disaggregated."""

from __future__ import annotations

import dataclasses

from jaxvlm.config import DualConfig
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.search.candidates import Candidate
from jaxvlm.planner.time import workload
from jaxvlm.planner.time.step_time import StepTime, step_time
from jaxvlm.spmd.encoder_share import best_first
from jaxvlm.train.disaggregated import EncoderAndRest


def with_replicated_encoder(candidate: Candidate) -> Candidate | None:
    """The candidate with the vision encoder's parameters replicated; ``None`` if they already are.

    See ``config.strategy.replicated``: moments and gradients stay sharded.
    """
    if not candidate.strategy.params or "vision" in candidate.strategy.replicated:
        return None
    replicated = (*candidate.strategy.replicated, "vision")
    strategy = dataclasses.replace(candidate.strategy, replicated=replicated)
    return candidate._replace(strategy=strategy)


def disaggregated(setup: StepSetup, time: StepTime, machine: Machine) -> tuple[int, float] | None:
    """Approximate step time with a disaggregated vision encoder (``config.encoder.devices``).

    Args:
        setup: of a step with the encoder on all devices.
        time: of the same step.
        machine: of the same step.

    Returns:
        Devices of the encoder and seconds of a step; ``None`` with more than one host, for pairs
        and
        for dual encoders. A step is as long as the side with more work per device, so never shorter
        than with the encoder on all devices. The encoder's transfers are not counted, since it runs
        ahead; whether dims and batch of both sides are divisible is checked by the run.
    """
    devices, tower = machine.devices, time.parts.get("vision", 0.0)
    if setup.pairs or isinstance(setup.config, DualConfig) or not tower:
        return None
    if devices == 1 or devices > machine.devices_per_host:
        return None
    rest = time.total - tower
    trainable = workload.trainable_of(setup).get("vision")
    if trainable and (trainable.own or trainable.adapted):
        # The backward pass recomputes the encoder.
        forward_only = setup._replace(frozen=("*",))
        tower += step_time(forward_only, machine).parts.get("vision", 0.0)
    counts = best_first(EncoderAndRest(tower, rest), devices)
    n = next(n for n in counts if setup.rows % (devices - n) == 0)  # one device divides any batch
    return n, devices * max(tower / n, rest / (devices - n))
