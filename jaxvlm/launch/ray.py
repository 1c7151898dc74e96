"""Ray: a program for ``ray job submit`` that starts one process a node."""

from __future__ import annotations

from jaxvlm.config import ConfigError
from jaxvlm.launch.job import FOLDER, PORT, STOPPED, Job, Rendered
from jaxvlm.parallel.distributed.exit_status import LOST

_PROGRAM = '''"""One process of jaxvlm on each of a Ray cluster's nodes, again where one is lost."""

import os
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

COMMAND = {command}
ENVIRONMENT = {environment}
RECIPE, RECIPE_TEXT = {shipped}, {recipe}
NODES, GPUS, PORT, RESTARTS, AGAIN = {nodes}, {gpus}, {port}, {restarts}, {again}


@ray.remote
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def work(coordinator, process):
    own = {{
        "JAXVLM_COORDINATOR": coordinator,
        "JAXVLM_NUM_PROCESSES": str(NODES),
        "JAXVLM_PROCESS_ID": str(process),
    }}
    if RECIPE_TEXT:
        os.makedirs(os.path.dirname(RECIPE), exist_ok=True)
        with open(RECIPE, "w", encoding="utf-8") as file:
            file.write(RECIPE_TEXT)
    return subprocess.call(COMMAND, env=os.environ | ENVIRONMENT | own)


def once():
    """Run all processes; the status of each, AGAIN of one whose node is lost."""
    bundle = {{"CPU": 1, "GPU": GPUS}} if GPUS else {{"CPU": 1}}
    group = placement_group([bundle] * NODES, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    how = [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        for i in range(NODES)
    ]
    first = ray.get(address.options(num_cpus=0, scheduling_strategy=how[0]).remote())
    tasks = [
        work.options(num_cpus=1, num_gpus=GPUS, scheduling_strategy=how[i]).remote(
            f"{{first}}:{{PORT}}", i
        )
        for i in range(NODES)
    ]
    ends = []
    for task in tasks:
        try:
            ends.append(ray.get(task))
        except ray.exceptions.RayError as error:
            print(f"a node was lost: {{error}}", file=sys.stderr)
            ends.append(AGAIN)
    ray.util.remove_placement_group(group)
    return ends


ray.init()
for attempt in range(RESTARTS + 1):
    ends = once()
    failed = [end for end in ends if end in (1, 2)]
    if failed or not any(ends):
        sys.exit(max(failed, default=0))
    print(f"a process was lost (statuses {{ends}}); starting again", file=sys.stderr)
sys.exit(AGAIN)
'''


def render(job: Job, address: str = "") -> Rendered:
    """Write the program, with the job's command in it.

    Args:
        job: to run; the cluster's nodes have jaxvlm.
        address: of the Ray cluster's dashboard; "": ``RAY_ADDRESS``.

    Raises:
        ConfigError: the machine is of TPUs.
    """
    if job.is_tpu:
        raise ConfigError("launch ray takes GPUs or CPUs; TPU slices are for gke, xpk or queued")
    text = _PROGRAM.format(
        command=repr(job.command),
        environment=repr(dict((*job.environment, STOPPED))),
        shipped=repr(job.shipped),
        recipe=repr(job.recipe),
        nodes=job.machine.hosts,
        gpus=job.gpus,
        port=PORT,
        restarts=job.restarts,
        again=LOST,
    )
    where = [f"--address={address}"] if address else []
    name = f"{job.name}.py"
    call = ("ray", "job", "submit", *where, f"--working-dir={FOLDER}",
            "--", "python", name)  # fmt: skip
    return Rendered({name: text}, call, "to see it: ray job list; to stop: ray job stop ID")
