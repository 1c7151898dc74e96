"""Published training set-ups as questions to the planner, and what their authors did as its ways.

``published_setups.json`` has a row a set-up: the model (by name, or the ``config.json`` fields of a
decoder alone), chips, batch, what is trained, and ``theirs``: the authors' strategy in our terms.
``source`` says where each figure stands, ``unknown`` what no source says, ``assumed`` what is taken
in its place. ``chip`` is what of the chip is not as in our table.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from jaxvlm.config import (
    Config,
    ConfigError,
    ConnectorConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    VisionConfig,
)
from jaxvlm.hf.families.text_decoders import decoder_from_hf
from jaxvlm.parallel.strategies import PRESETS, resolve
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.hardware.machine import Machine
from jaxvlm.planner.request import abstract_devices, request
from jaxvlm.planner.request.request import PlanRequest, RequestFlags
from jaxvlm.planner.search.candidates import Candidate

FILE = pathlib.Path(__file__).with_name("published_setups.json")
# A decoder alone is a model whose tower sees no image: six million frozen parameters that any
# mesh divides.
_NO_TOWER = VisionConfig(width=1024, num_heads=16, mlp_dim=1024, depth=1)
_NO_CONNECTOR = ConnectorConfig(kind="linear")


def load() -> list[dict[str, Any]]:
    """The rows."""
    return list(json.loads(FILE.read_text(encoding="utf-8")))


def machine_of(row: dict[str, Any]) -> Machine:
    """What the authors trained on."""
    found = machine.parse(row["devices"])
    if given := row.get("chip"):
        chip = found.chip._replace(
            hbm_bytes=given["hbm_gib"] * 2**30, hbm_bandwidth=given["hbm_gb_per_s"] * 1e9
        )
        found = found._replace(chip=chip)
    return found


def question_of(row: dict[str, Any]) -> PlanRequest:
    """The authors' model, batch and chips, with nothing said of how.

    Raises:
        ConfigError: what the planner can't plan.
    """
    batch, there = row["batch"], machine_of(row)
    if "text" in row:
        asked = _of_text(row, there)
    else:
        wanted = RequestFlags(
            batch=batch["rows"],
            length=batch["length"],
            images=batch.get("images", 0),
            patches=batch.get("patches", 0),
            objective=row.get("loss", ""),
        )
        asked = request.plan_request(row["model"], None, there, wanted)
    lora = row.get("lora", {})
    frozen = (*asked.config.optim.frozen, *row["frozen"])
    optim = dataclasses.replace(asked.config.optim, frozen=frozen)
    config = request.with_network(
        dataclasses.replace(asked.config, optim=optim),
        dataclasses.replace(asked.config.network, lora=LoraConfig(**lora)),
    )
    return asked._replace(name=row["id"], config=config)


def _of_text(row: dict[str, Any], there: Machine) -> PlanRequest:
    batch = row["batch"]
    model = ModelConfig(
        vision=_NO_TOWER,
        connector=_NO_CONNECTOR,
        decoder=decoder_from_hf(row["text"], "text."),
        dtype="bfloat16",
    )
    config = Config(model=model)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, max_length=batch["length"], batch_size=batch["rows"]),
        optim=dataclasses.replace(config.optim, frozen=("vision/*", "connector/*")),
    )
    return PlanRequest(row["id"], config, there, 0, 0)


def theirs(row: dict[str, Any]) -> Candidate:
    """What the authors did, with the remat of ours that is nearest to theirs."""
    said = row["theirs"]
    mesh = MeshConfig(**{"data": 1, **said["mesh"]})
    strategy = dataclasses.replace(PRESETS[said["preset"]], name=said["preset"])
    if mesh.context > 1:
        strategy = dataclasses.replace(strategy, context="ring")
    if said.get("sequence"):
        strategy = dataclasses.replace(strategy, sequence_parallel=True)
    return Candidate(said["preset"], mesh, strategy, said["remat"], said["microbatches"])


def parts(way: Candidate, asked: PlanRequest) -> None:
    """Hold a way against what a run would check: microbatches, stages, mesh and strategy.

    Raises:
        ConfigError: the run would refuse it.
    """
    there = asked.machine
    devices = abstract_devices.devices(there.platform, there.devices, there.devices_per_host)
    resolve(dataclasses.replace(way.strategy, name=way.preset), way.mesh, devices)
    rows, depth = asked.rows, asked.config.model.decoder.depth
    if rows % (way.shards * way.microbatches):
        raise ConfigError(f"{rows} rows by {way.shards} shards x {way.microbatches} microbatches")
    if depth % way.mesh.pipeline:
        raise ConfigError(f"{depth} layers by {way.mesh.pipeline} stages")
