"""Each launcher's variables say where a process stands, or the process is refused by name."""

from __future__ import annotations

import json

import isolation
import pytest
from launcher_variables import (
    LOOPBACK,
    MPIRUN,
    OWN,
    POOLS,
    SKYPILOT,
    SLICES,
    SLURM_STEP,
    TORCHRUN,
    XPK,
    XPK_GPU,
    on_loopback,
    replica,
)
from runs import finished_pair

from jaxvlm.config import ConfigError
from jaxvlm.parallel.distributed import processes
from jaxvlm.parallel.distributed.places import (
    LAUNCHERS,
    VARIABLES,
    ProcessPlace,
    find_place,
    first_host,
    refuse_alone,
)

JOINED = {
    "by hand": (OWN | {"JAXVLM_NUM_PROCESSES": "4", "JAXVLM_PROCESS_ID": "3"}, "h:1", None),
    "SLURM": (SLURM_STEP, "gpu07:61447", None),
    "SLURM, two tasks a node": (
        SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "gpu07:61447", [1],
    ),
    "Open MPI": (MPIRUN, "10.96.0.1", [1]),
    "torchrun": (TORCHRUN, "node0:29501", None),
    "torchrun, a process a GPU": (
        TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "node0:29501", [1],
    ),
    "a PyTorchJob": (
        {n: x for n, x in TORCHRUN.items() if "TORCHELASTIC" not in n}, "node0:29500", None,
    ),
    "SkyPilot": (SKYPILOT, "10.0.0.1", None),
    "TPU slices": (SLICES, "run-slice-0-0.run:8482", None),
    "Vertex AI": (replica("workerpool1", 2), "w0:2222", None),
    "xpk": (XPK, "run-main-0-0.run:1234", None),
    "xpk on GPUs": (XPK_GPU, "run-main-0-0.run:6002", None),
    "JAX's own": (
        {"JAX_COORDINATOR_ADDRESS": "h:9", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"},
        "h:9", None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("launcher", JOINED)
def test_the_last_of_four_finds_its_place(launcher):
    environ, where, devices = JOINED[launcher]
    place = find_place(environ)
    assert place[1:] == (4, 3, devices)
    host, _, port = place.coordinator.rpartition(":")
    assert where in (host, place.coordinator) and 0 < int(port) < 2**16
    assert find_place(environ | {"JAXVLM_NUM_PROCESSES": "1", "JAXVLM_PROCESS_ID": "0"}) is None
    if launcher != "by hand":  # what a launcher doesn't know, a person may
        assert find_place(environ | {"JAXVLM_COORDINATOR": "x:5"}).coordinator == "x:5"
        with pytest.raises(ConfigError, match="JAXVLM_NUM_PROCESSES is set but"):
            find_place(environ | {"JAXVLM_NUM_PROCESSES": "4"})
        with pytest.raises(ConfigError, match="nothing joins them"):
            refuse_alone(environ)  # of a process that did not join


def test_unlike_numbers_of_tasks_a_node():
    for tasks, devices in (("1,3", [1]), ("2(x2),1", [1]), ("1(x3),1", None), ("1", None)):
        step = SLURM_STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks}
        assert find_place(step).local_devices == devices


def test_where_jax_finds_the_processes_no_launcher_numbers_them():
    for environ in (SLICES, SKYPILOT, XPK):
        assert find_place(environ | {"JAXVLM_DISTRIBUTED": "auto"}) is None
    assert find_place(OWN | {"JAXVLM_DISTRIBUTED": "auto"}) is not None


ONE_INSIDE_THE_OTHER = {
    "mpirun in SLURM": (MPIRUN, SLURM_STEP | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}),
    "torchrun in SLURM": (TORCHRUN, SLURM_STEP | {"SLURM_PROCID": "0"}),
    "torchrun in SkyPilot": (TORCHRUN, SKYPILOT | {"SKYPILOT_NODE_RANK": "0"}),
    "srun with names of torchrun's": (SLURM_STEP, {"WORLD_SIZE": "4"}),
    "srun of PMI2": (SLURM_STEP, {"PMI_SIZE": "4", "PMI_RANK": "3"}),
    "TPU slices of xpk": (SLICES, {"PROCESSES_IN_JOB": "2"}),
    "SkyPilot on TPU hosts": (SLICES, SKYPILOT | {"SKYPILOT_NODE_RANK": "0"}),
}


@pytest.mark.parametrize("nested", ONE_INSIDE_THE_OTHER)
def test_the_inner_launcher_is_read(nested):
    inner, outer = ONE_INSIDE_THE_OTHER[nested]
    assert find_place(outer | inner) == find_place(inner)


HALF_SET = {
    "Open MPI": ({n: x for n, x in MPIRUN.items() if n != "OMPI_COMM_WORLD_RANK"}, "_RANK is not"),
    "torchrun": ({n: x for n, x in TORCHRUN.items() if n != "RANK"}, "but RANK is not"),
    "SkyPilot": (SKYPILOT | {"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not"),
    "SkyPilot, out of range": (SKYPILOT | {"SKYPILOT_NODE_RANK": "4"}, "must be below 4"),
    "SLURM, out of range": (SLURM_STEP | {"SLURM_PROCID": "4"}, "SLURM_PROCID is 4"),
    "TPU slices": (SLICES | {"TPU_WORKER_ID": ""}, "TPU_WORKER_ID is not set"),
    "TPU slices, whose": (SLICES | {"MEGASCALE_SLICE_ID": ""}, "MEGASCALE_SLICE_ID is not set"),
    "TPU slices, where": (
        SLICES | {"MEGASCALE_COORDINATOR_ADDRESS": ""}, "MEGASCALE_COORDINATOR_ADDRESS is not set",
    ),
    "TPU slices, out of range": (SLICES | {"MEGASCALE_SLICE_ID": "2"}, "must be below 2"),
    "one TPU host a slice": (
        {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "localhost"},
        "MEGASCALE_NUM_SLICES=2, but MEGASCALE_SLICE_ID, MEGASCALE_COORDINATOR_ADDRESS is not set",
    ),
    "Vertex AI, no JSON": ({"CLUSTER_SPEC": "{'cluster'"}, "CLUSTER_SPEC is not what Vertex AI"),
    "Vertex AI, no task": ({"CLUSTER_SPEC": json.dumps({"cluster": POOLS})}, "KeyError: 'task'"),
    "Vertex AI, a list": ({"CLUSTER_SPEC": "[]"}, "CLUSTER_SPEC is not what Vertex AI"),
    "Vertex AI, a reducer": (replica("workerpool2", 0), "Reduction Server"),
    "Vertex AI, out of range": (replica("workerpool1", 3), "is not among its addresses"),
    "xpk, out of range": (XPK | {"JOB_INDEX": "2"}, "make process 5; it must be below 4"),
    "by hand": ({name: OWN[name] for name in list(OWN)[:2]}, "JAXVLM_PROCESS_ID is not: set all"),
    "by hand, one": ({"JAXVLM_COORDINATOR": "h:1"}, "or the first alone where a launcher"),
    "by hand, out of range": (OWN | {"JAXVLM_PROCESS_ID": "2"}, "must be below 2"),
    "by hand, no number": (OWN | {"JAXVLM_PROCESS_ID": "one"}, "must be a number"),
}  # fmt: skip


@pytest.mark.parametrize("case", HALF_SET)
def test_what_is_incomplete_or_contradicts_itself_is_refused(case):
    environ, message = HALF_SET[case]
    with pytest.raises(ConfigError, match=message) as caught:
        find_place(environ)
    assert "\n" not in str(caught.value)


def test_the_environment_of_one_process():
    assert find_place({}) is None
    assert not processes.initialize()
    assert find_place(OWN | {"JAXVLM_NUM_PROCESSES": "1", "JAXVLM_PROCESS_ID": "0"}) is None


SEVERAL = {
    "OpenMPI": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
    "PMI": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "MVAPICH2": {"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"},
    "Flux": {"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"},
    "jsrun": {"JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "0"},
    "AWS Batch": {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
    "names like JAX's own": {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
    "torchrun": {"WORLD_SIZE": "2", "RANK": "1"},
    "a rank that is not there": {"WORLD_SIZE": "2"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"},
    "xpk": {"PROCESSES_IN_JOB": "2", "JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run"},
    "an indexed Job": {"JOB_COMPLETION_INDEX": "1"},
    "a replicated job": {"JOB_INDEX": "1", "JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run"},
    "JobSet": {"JOBSET_NAME": "run", "JOB_COMPLETION_INDEX": "0"},
    "SLURM without srun": {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
}
"""Variables that say that there are several processes, and not where process 0 is."""
ALONE = {
    "nothing": {},
    "OpenMPI": {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    "torchrun": {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
    "SkyPilot": {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_IPS": "10.0.0.1"},
    "one TPU host": {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "1"},
    "xpk": {"PROCESSES_IN_JOB": "1", "JOB_COMPLETION_INDEX": "0", "JOBSET_NAME": "run"},
    "a JobSet's TPU": SEVERAL["JobSet"] | {"TPU_WORKER_HOSTNAMES": "localhost"},
    "an indexed Job's first": {"JOB_COMPLETION_INDEX": "0"},
    "a shell of salloc": {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},
    "srun -n1": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a replica": replica("workerpool0", 0, {"workerpool0": ["w0:2222"]}),
    "a variable of other programs": {"NNODES": "2"},
}


@pytest.mark.parametrize("launcher", SEVERAL)
def test_one_of_several_that_nothing_joins_is_refused(launcher):
    name = next(iter(SEVERAL[launcher]))
    assert find_place(SEVERAL[launcher]) is None
    with pytest.raises(ConfigError, match=rf"^{name}=.*nothing joins them; set JAXVLM_COORD"):
        refuse_alone(SEVERAL[launcher])
    refuse_alone(SEVERAL[launcher] | {"JAXVLM_NUM_PROCESSES": "1"})


def test_nothing_is_said_by_other_variables_alone():
    """So a process that has none of them need not ask."""
    every = [environ for environ, *_ in (*JOINED.values(), *HALF_SET.values())]
    for environ in (*every, *SEVERAL.values()):
        assert not VARIABLES.isdisjoint(environ)
        others = {name: value for name, value in environ.items() if name not in VARIABLES}
        assert find_place(others) is None
        refuse_alone(others)


def test_each_launcher_without_an_address_is_refused():
    tested = {next(iter(environ)) for environ in SEVERAL.values()}
    assert {x.num_processes for x in LAUNCHERS} - {"NNODES"} <= tested


@pytest.mark.parametrize("launcher", ALONE)
def test_a_process_that_is_alone_is_not_refused(launcher):
    refuse_alone(ALONE[launcher])
    assert find_place(ALONE[launcher]) is None


@pytest.mark.parametrize("value", ["two", "-2", "2.0", "\u00b2"])
@pytest.mark.parametrize("name", ["WORLD_SIZE", "SKYPILOT_NUM_NODES"])
def test_a_malformed_count_is_refused(name, value):
    for reads in (find_place, refuse_alone):
        with pytest.raises(ConfigError, match=f"^{name} must be a number, not"):
            reads({name: value})


def test_asked_to_be_alone_it_joins_none():
    alone = {"JAXVLM_NUM_PROCESSES": "1"}
    assert find_place(alone | SLURM_STEP) is None
    assert find_place(alone | SLICES) is None
    assert not processes._detects_pod(alone | {"JAXVLM_DISTRIBUTED": "auto"})
    with pytest.raises(ConfigError, match="JAXVLM_COORDINATOR is not"):
        find_place(alone | {"JAXVLM_PROCESS_ID": "1"})


def test_no_test_sees_a_launchers_variables():
    names = {name for environ, *_ in JOINED.values() for name in environ}
    names |= {name for environ in SEVERAL.values() for name in environ}
    assert all(name.startswith(isolation.OF_OTHERS) for name in names)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("a1,b2", "a1"),
        ("n[3,5]", "n3"),
        ("x-[010-020]", "x-010"),
        ("q", "q"),
        ("rack[1-2]-node[01-03],z", "rack1-node01"),
        ("gpu[07-09,12],a", "gpu07"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


PROGRAM = """
from jaxvlm.parallel.distributed import processes

assert processes.initialize()
import jax
import numpy as np
from jax.experimental import multihost_utils

with processes.guard_peers():
    every = multihost_utils.process_allgather(np.asarray(jax.process_index()))
    print("joined", jax.process_index(), "of", jax.process_count(), every.tolist(), flush=True)
"""


@pytest.mark.parametrize(
    "launcher", [LOOPBACK[0], *(pytest.param(x, marks=pytest.mark.long) for x in LOOPBACK[1:])]
)
def test_two_processes_join(launcher):
    of = on_loopback(launcher)
    for i, said in enumerate(finished_pair(PROGRAM, of=lambda i: of(str(i)))):
        assert f"joined {i} of 2 [0, 1]" in said


def test_places_are_values():
    assert find_place(OWN) == ProcessPlace("h:1", 2, 1, None)
