"""Lower the train step of every published model for every chip, and name its attention kernels.

    pip install -e '.[aot]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m benchmarks.lowering [--chips h200:8 ...]

Real sizes, eight devices, ``fsdp``, full remat, default settings: every model of the zoo x H200,
A100, v5p, v6e x all weights, LoRA, a frozen vision encoder x packed sequences, sequences that share
images; dual encoders have pairs instead. Lowering runs all of our code and JAX's checks of shapes
and dtypes for the chip, and the compiler of a Pallas kernel to its own language; no program is
compiled. The result has a digest of the sources that decide which kernel runs, and one of each
model's settings: a test compares them. Rows that are in the result are kept if both are the same.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np

from benchmarks.common import RESULTS, ROOT, environment, write
from jaxvlm.config import DualConfig, MeshConfig, StrategyConfig
from jaxvlm.hf import model_zoo
from jaxvlm.parallel.mesh import BATCH_AXES
from jaxvlm.parallel.strategies import PRESETS
from jaxvlm.planner.compiled import topology, verify
from jaxvlm.planner.hardware import machine
from jaxvlm.planner.memory.step_memory import StepSetup
from jaxvlm.planner.request import abstract_devices, request
from jaxvlm.planner.search import candidates
from jaxvlm.types import Batch

NAME = "lowering_aot"
CHIPS = ("h200:8", "a100:8", "v5p:2x2x2", "v6e:2x4")
TRAINED = ("full", "lora", "frozen tower")
BATCHES = ("packed", "shared images")
LENGTH = 3968
"""Tokens of a sequence: no width of a published model, so that a square of them is attention's."""
_SOURCES = (
    "jaxvlm/nn/kernels/*.py", "jaxvlm/nn/attention*.py", "jaxvlm/nn/mask.py",
    "jaxvlm/models/decoder.py", "jaxvlm/models/vit.py", "jaxvlm/models/text_encoder.py",
    "jaxvlm/models/grid.py",
)  # fmt: skip
_CALL = re.compile(r"custom_call @([\w.$]+)\(.*")
_NAMED = re.compile(r'(?<![\w])(?:kernel_)?name = "(\w+)"')
_OTHERS = ("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy")
"""Custom calls that are no kernels."""


class Case(NamedTuple):
    """A train step."""

    chip: str
    model: str
    trained: str
    batch: str


def cases() -> Iterator[Case]:
    """All of them; the batch of a dual encoder is ``pairs``."""
    for model in model_zoo.names():
        batches = ("pairs",) if _is_dual(model) else BATCHES
        for case in itertools.product(CHIPS, (model,), TRAINED, batches):
            yield Case(*case)


def cover() -> list[Case]:
    """Each model once, and all chips with all that is trained and all batches."""
    found = []
    for i, model in enumerate(model_zoo.names()):
        batch = "pairs" if _is_dual(model) else BATCHES[i // 12 % 2]
        found.append(Case(CHIPS[i % 4], model, TRAINED[i % 3], batch))
    return found


def _is_dual(model: str) -> bool:
    return isinstance(model_zoo.config_of(model), DualConfig)


class Layout(NamedTuple):
    """Devices and what is split over them, resolved."""

    mesh: MeshConfig = MeshConfig(data=1, fsdp=8)
    strategy: StrategyConfig = PRESETS["fsdp"]


FSDP = Layout()


def setup_of(case: Case, layout: Layout = FSDP) -> StepSetup:
    """The step as ``jaxvlm plan`` would have it."""
    train = "lora" if case.trained == "lora" else ""
    length = 0 if case.batch == "pairs" else LENGTH
    rows = math.prod(getattr(layout.mesh, axis) for axis in BATCH_AXES)
    flags = request.RequestFlags(batch=rows, length=length, train=train)
    asked = request.plan_request(case.model, None, machine.parse(case.chip), flags)
    if case.trained == "frozen tower":
        optim = dataclasses.replace(asked.config.optim, frozen=("vision/*",))
        asked = asked._replace(config=dataclasses.replace(asked.config, optim=optim))
    way = candidates.Candidate("", *layout, "full")
    return candidates.setup_of(asked, way)


def batch_of(case: Case, setup: StepSetup) -> Batch | None:
    """The step's batch where the setup does not describe it: several segments share a parent."""
    if case.batch != "shared images":
        return None
    row = (setup.rows, setup.length, setup.images, setup.patches)
    batch = abstract_devices.batch(setup.config, *row)
    return batch._replace(parent=jax.ShapeDtypeStruct(batch.segment.shape, np.int32))


def kernels(text: str) -> dict[str, int]:
    """Custom calls of a program in StableHLO, by the names of their kernels."""
    found = collections.Counter[str]()
    for call in _CALL.finditer(text):
        target, named = call.group(1), _NAMED.search(call.group(0))
        if not target.startswith(_OTHERS):
            found[named.group(1) if named else target.lstrip("_")] += 1
    return dict(sorted(found.items()))


def squares(text: str, setup: StepSetup) -> list[str]:
    """Arrays of a program that have all queries and all keys as dims: scores, or a dense mask.

    Of 2,048 tokens and fewer, they are not looked for.
    """
    sizes = {n for n in (setup.length, setup.patches) if n > 2048}
    shapes = set(re.findall(r"tensor<([0-9x]+)x[a-z]\w*>", text))
    return sorted(s for s in shapes if any(s.split("x").count(str(n)) > 1 for n in sizes))


def lower(case: Case, layout: Layout = FSDP) -> dict[str, Any]:
    """The kernels of a step, or why it can't be lowered."""
    start = time.process_time()
    try:
        setup = setup_of(case, layout)
        batch = batch_of(case, setup)
        text = verify.lowered(setup, topology.devices(case.chip), batch=batch).as_text()
    except Exception as error:  # JAX's and Pallas' are of many kinds: each is a row of the table
        return {"why": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    found = {"kernels": kernels(text), "squares": squares(text, setup)}
    return found | {"seconds": round(time.process_time() - start, 1)}


def digest() -> str:
    """Digest of the sources that decide which kernels run, without comments and docstrings."""
    total = hashlib.sha256()
    for path in sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern)):
        total.update(f"{path.relative_to(ROOT)}\n".encode())
        text = path.read_text(encoding="utf-8")
        total.update((_without_docs(text) if path.suffix == ".py" else text).encode())
    return total.hexdigest()[:16]


def digests(models: Iterable[str]) -> dict[str, str]:
    """Digest of each model's settings, without those at their defaults."""
    found = {name: repr(_set_fields(model_zoo.config_of(name))) for name in models}
    return {name: hashlib.sha256(x.encode()).hexdigest()[:16] for name, x in found.items()}


def _set_fields(config: Any) -> Any:
    """Settings that differ from the defaults of their classes: a new one changes no digest."""
    if not dataclasses.is_dataclass(config):
        return config
    own, found = type(config)(), {}
    for field in dataclasses.fields(config):
        if (value := getattr(config, field.name)) != getattr(own, field.name):
            found[field.name] = _set_fields(value)
    return found


def _without_docs(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            body[:] = [x for x in body if not _is_text(x)]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _model_of(row: dict[str, Any]) -> str:
    return str(row["case"].split(", ")[1])


def main() -> None:
    """Lower what is not in the result yet, and write it after each row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chips", nargs="*", default=CHIPS, choices=CHIPS)
    parser.add_argument("--models", nargs="*", default=model_zoo.names())
    args = parser.parse_args()
    path, now, models = RESULTS / f"{NAME}.json", digest(), digests(model_zoo.names())
    before = json.loads(path.read_text()) if path.exists() else {}
    rows = before.get("rows", []) if before.get("digest") == now else []
    same = [name for name, own in models.items() if before.get("models", {}).get(name) == own]
    rows = [row for row in rows if _model_of(row) in same]
    done, here = {row["case"] for row in rows}, environment()
    for case in cases():
        name = ", ".join(case)
        if name in done or case.chip not in args.chips or case.model not in args.models:
            continue
        rows.append({"case": name, **lower(case)})
        print(rows[-1], flush=True)
        jax.clear_caches()
        failed = [row["case"] for row in rows if "why" in row]
        square = [row["case"] for row in rows if row.get("squares")]
        summary = {"rows": len(rows), "failed": failed, "with squares": square}
        known = {name: models[name] for name in models if name in {_model_of(row) for row in rows}}
        found = {"digest": now, "models": known, "summary": summary, "environment": here}
        found["rows"] = rows
        write(f"{NAME}.json", found)


if __name__ == "__main__":
    main()
