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
SIZES, GPUS, PORT, RESTARTS, AGAIN = {sizes}, {gpus}, {port}, {restarts}, {again}


@ray.remote
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def work(coordinator, process, nodes):
    own = {{
        "JAXVLM_COORDINATOR": coordinator,
        "JAXVLM_NUM_PROCESSES": str(nodes),
        "JAXVLM_PROCESS_ID": str(process),
    }}
    if RECIPE_TEXT:
        os.makedirs(os.path.dirname(RECIPE), exist_ok=True)
        with open(RECIPE, "w", encoding="utf-8") as file:
            file.write(RECIPE_TEXT)
    return subprocess.call(COMMAND, env=os.environ | ENVIRONMENT | own)


def size_of(left):
    """The most nodes of SIZES that are there; the fewest, which are waited for, where none are."""
    return next((size for size in SIZES if size <= left), SIZES[-1])


def alive():
    """The number of nodes that the job can use."""
    there = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(have.get("CPU", 0) >= 1 and have.get("GPU", 0) >= GPUS for have in there)


def once(nodes):
    """Run so many processes; the status of each, and how many nodes were lost."""
    bundle = {{"CPU": 1, "GPU": GPUS}} if GPUS else {{"CPU": 1}}
    group = placement_group([bundle] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    how = [
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i)
        for i in range(nodes)
    ]
    first = ray.get(address.options(num_cpus=0, scheduling_strategy=how[0]).remote())
    tasks = [
        work.options(num_cpus=1, num_gpus=GPUS, scheduling_strategy=how[i]).remote(
            f"{{first}}:{{PORT}}", i, nodes
        )
        for i in range(nodes)
    ]
    ends, lost = [], 0
    for task in tasks:
        try:
            ends.append(ray.get(task))
        except ray.exceptions.RayTaskError:
            raise  # the command could not be started: an error that would come again
        except ray.exceptions.RayError as error:
            print(f"a node was lost: {{error}}", file=sys.stderr)
            ends.append(AGAIN)
            lost += 1
    ray.util.remove_placement_group(group)
    return ends, lost


ray.init()
nodes = SIZES[0]
for attempt in range(RESTARTS + 1):
    ends, lost = once(nodes)
    failed = [end for end in ends if 0 < end < 128 and end != AGAIN]
    if failed or not any(ends):
        sys.exit(max(failed, default=0))
    nodes = size_of(min(alive(), nodes - lost) if lost else alive())
    print(f"a process was lost (statuses {{ends}}); starting again on {{nodes}}", file=sys.stderr)
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
        sizes=job.sizes or (job.machine.hosts,),
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
