"""Jobs that ``jaxvlm launch`` writes, checked by the programs that will read them.

    PYTHONPATH=. python benchmarks/launch_validators.py --crd jobset.yaml \
        --kubernetes K8S/bin/python --sky SKY/bin/python --xpk XPK/bin/xpk --ray RAY/bin/python

Each in an environment of its own, since they pin what others need: ``kubernetes-validate`` with
``jsonschema`` and ``google-cloud-aiplatform``; ``skypilot``; ``xpk``; ``ray``. ``--crd`` is
JobSet's custom resource definition (config/components/crd/bases of kubernetes-sigs/jobset), of
which unknown fields are refused too. Ray runs the program on a cluster of two nodes in one
machine, whose processes join and compute together. No program checks gcloud's own flags. Writes
results/launch_validators.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.common import RESULTS, environment, write
from jaxvlm.config import Config, StrategyConfig
from jaxvlm.launch import targets
from jaxvlm.launch.job import Job
from jaxvlm.planner.hardware.machine import parse

DDP = Config(strategy=StrategyConfig(name="ddp"))
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("gke", devices, {"claim": "runs", "queue": "q"}) for devices in (
        "a100-40gb:16", "a100:8", "h100:16", "h200:8", "b200:16", "v4:2x2x2", "2xv5e:4x4",
        "v5p:2x2x2", "v6e:16", "7x:2x2x2")),
    *(("vertex", devices, {"region": "r", "spot": True}) for devices in (
        "a100-40gb:8", "a100:16", "h100:16", "h200:8", "b200:16")),
    ("vertex", "h100:32", {"region": "r", "reduction_servers": 4, "config": DDP}),
    *(("sky", devices, {"install": "jaxvlm", "spot": True}) for devices in (
        "a100-40gb:8", "a100:16", "h100:16", "h200:8", "b200:8", "rtx4090:8", "rtx6000ada:8",
        "rtxpro6000:8", "cpu:4", "v4:2x2x2", "v5e:16", "v5p:2x2x2", "v6e:16")),
    *(("xpk", devices, {"cluster": "c", "zone": "us-central1-a", "project": "p"}) for devices in (
        "a100-40gb:8", "h100:16", "h200:8", "b200:8", "v4:2x2x2", "2xv5e:4x4", "v5p:2x2x2",
        "v6e:16", "7x:2x2x2")),
)  # fmt: skip
KUBERNETES = """
import json, sys, yaml, jsonschema, kubernetes_validate
crd, *files = sys.argv[1:]
versions = yaml.safe_load(open(crd))["spec"]["versions"]
schema = next(v for v in versions if v["name"] == "v1alpha2")["schema"]["openAPIV3Schema"]

def closed(part):
    if isinstance(part, dict):
        if part.get("x-kubernetes-int-or-string"):
            part.pop("anyOf", None), part.pop("pattern", None)
            part["type"] = ["integer", "string"]
        if "properties" in part and not part.get("x-kubernetes-preserve-unknown-fields"):
            part.setdefault("additionalProperties", False)
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    for value in parts:
        closed(value)

closed(schema)
schema["properties"]["metadata"] = {"type": "object"}
for file in files:
    manifest = yaml.safe_load(open(file))
    jsonschema.Draft202012Validator(schema).validate(manifest)
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    work = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(work, "1.35", strict=True)
"""
VERTEX = """
import json, sys, yaml
from google.cloud.aiplatform_v1.types import CustomJobSpec
for file in sys.argv[1:]:
    CustomJobSpec.from_json(json.dumps(yaml.safe_load(open(file))))
"""
SKY = """
import sys, sky, yaml
for file in sys.argv[1:]:
    task = sky.Task.from_yaml_config(yaml.safe_load(open(file)))
    resources = list(task.resources)[0]
    assert resources.accelerators or resources.cpus, file
"""
RAY = """
import os, subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
env = os.environ | {"RAY_ADDRESS": cluster.address}
done = subprocess.run([sys.executable, sys.argv[1]], env=env)
cluster.shutdown()
sys.exit(done.returncode)
"""
JOINS = """
import os, pathlib, sys
from jaxvlm.parallel.distributed import processes
assert processes.initialize()
import jax, numpy as np
from jax.experimental import multihost_utils
every = multihost_utils.process_allgather(np.asarray(jax.process_index())).tolist()
pathlib.Path(sys.argv[1], str(jax.process_index())).write_text(str(every))
"""


def written(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Write all cases; each with its file, and the call that takes it."""
    rows = []
    for number, (target, devices, own) in enumerate(CASES):
        arguments = ("train", "--config=configs/quickstart.py", "--workdir=/runs/first")
        image = "" if target == "sky" else "registry/jaxvlm:0.1"
        named = parse(devices, "bfloat16")
        job = Job(f"case-{number}", arguments, named, image, (("A", "b 'c"),))
        made = targets.render(target, job, **own)
        call = targets.written(made, folder).command
        file = str(folder / next(iter(made.files)))
        rows.append({"target": target, "devices": devices, "file": file, "call": call})
    return rows


def checked(
    python: str, program: str, given: list[str], files: list[str], folder: pathlib.Path
) -> str:
    """Run a validator's program on each file: "" where all pass, else what it says."""
    env = os.environ | {"HOME": str(folder)}
    for file in files:
        words = [python, "-c", program, *given, file]
        done = subprocess.run(words, env=env, capture_output=True, text=True)
        if done.returncode:
            return f"{pathlib.Path(file).name}: {(done.stderr or done.stdout)[-400:]}"
    return ""


def of_ray(python: str, folder: pathlib.Path) -> str:
    """Run the program of two nodes on a cluster of two in this machine."""
    job = Job("joins", (), parse("cpu:1", "float32")._replace(hosts=2), restarts=0)
    text = next(iter(targets.render("ray", job).files.values()))
    command = json.dumps([sys.executable, "-c", JOINS, str(folder)])
    program = folder / "joins.py"
    program.write_text(text.replace("COMMAND = ['jaxvlm']", f"COMMAND = {command}"))
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}

    done = subprocess.run(
        [python, "-c", RAY, str(program)], env=os.environ | own, capture_output=True, text=True
    )
    said = [(folder / str(i)).read_text() for i in range(2) if (folder / str(i)).exists()]
    return "" if said == ["[0, 1]"] * 2 and not done.returncode else (done.stderr or "")[-400:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("crd", "kubernetes", "sky", "xpk", "ray"):
        parser.add_argument(f"--{name}", default="")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        rows = written(folder)
        files = {t: [r["file"] for r in rows if r["target"] == t] for t in ("gke", "vertex", "sky")}
        if args.kubernetes:
            crd, python = [args.crd], args.kubernetes
            schemas = "gke: JobSet's schema, Kubernetes' schemas"
            found[schemas] = checked(python, KUBERNETES, crd, files["gke"], folder)
            found["vertex: protobuf"] = checked(python, VERTEX, [], files["vertex"], folder)
        if args.sky:
            found["sky: SkyPilot's parser"] = checked(args.sky, SKY, [], files["sky"], folder)
        if args.xpk:
            of_xpk = [row for row in rows if row["target"] == "xpk"]
            calls = [[args.xpk, *row["call"][1:], "--dry-run"] for row in of_xpk]
            ends = [subprocess.run(c, capture_output=True, text=True) for c in calls]
            bad = [(done.stdout + done.stderr)[-400:] for done in ends if done.returncode]
            found["xpk: dry run"] = bad[0] if bad else ""
        if args.ray:
            found["ray: two nodes join"] = of_ray(args.ray, folder)
    counts = {t: sum(row["target"] == t for row in rows) for t in ("gke", "vertex", "sky", "xpk")}
    result = {"jobs": counts, "faults": found, "environment": environment()}
    write("launch_validators.json", result, RESULTS)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
