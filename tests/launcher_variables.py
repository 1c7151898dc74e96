"""Variables that launchers set for their processes, and for two that run on this machine."""

from __future__ import annotations

import json
import random

from runs import free_port

OWN = {"JAXVLM_COORDINATOR": "h:1", "JAXVLM_NUM_PROCESSES": "2", "JAXVLM_PROCESS_ID": "1"}
SLURM_STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TORCHRUN = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
    "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "3", "SKYPILOT_TASK_ID": "sky-7",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3\n10.0.0.4",
}  # fmt: skip
SLICES = {
    "TPU_WORKER_HOSTNAMES": "run-slice-0-0.run,run-slice-0-1.run", "TPU_WORKER_ID": "1",
    "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "run-slice-0-0.run:8080", "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "run",
}  # fmt: skip
POOLS = {"workerpool0": ["w0:2222"], "workerpool1": ["w1:2222", "w2:2222", "w3:2222"],
         "workerpool2": ["r0:2222"]}  # fmt: skip
XPK = {
    "JAX_PROCESS_COUNT": "4", "JAX_COORDINATOR_ADDRESS": "run-main-0-0.run", "JOB_INDEX": "1",
    "PROCESSES_IN_JOB": "2", "JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "run",
}  # fmt: skip
XPK_GPU = {
    "NNODES": "4", "NODE_RANK": "3", "JAX_COORDINATOR_ADDRESS": "run-main-0-0.run",
    "JAX_COORDINATOR_PORT": "6002", "JOBSET_NAME": "run", "JOB_COMPLETION_INDEX": "3",
}  # fmt: skip


def replica(pool, index, pools=POOLS):
    spec = {"cluster": pools, "task": {"type": pool, "index": index}, "environment": "cloud"}
    return {"CLUSTER_SPEC": json.dumps(spec)}


def on_loopback(launcher):
    """The variables of a process of two that run here, by its number as text."""
    port, job = free_port(), random.randrange(10**6)
    return {
        "SLURM": lambda i: SLURM_STEP | {
            "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": i, "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_JOB_ID": str(job)},
        "Open MPI": lambda i: {
            "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": i,
            "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1,10.0.0.1:3"},
        "torchrun": lambda i: TORCHRUN | {
            "WORLD_SIZE": "2", "RANK": i, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)},
        "SkyPilot": lambda i: SKYPILOT | {
            "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": i, "SKYPILOT_TASK_ID": str(port),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"},
        "TPU slices": lambda i: {
            "TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_NUM_SLICES": "2",
            "MEGASCALE_SLICE_ID": i, "MEGASCALE_COORDINATOR_ADDRESS": "localhost"},
        "Vertex AI": lambda i: replica(
            f"workerpool{i}", 0,
            {"workerpool0": [f"127.0.0.1:{port}"], "workerpool1": ["127.0.0.1:1"]}),
        "xpk": lambda i: XPK | {
            "JAX_PROCESS_COUNT": "2", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JOB_INDEX": i, "PROCESSES_IN_JOB": "1", "JOB_COMPLETION_INDEX": "0"},
        "JobSet": lambda i: {"JOBSET_NAME": "run"} | {  # as `jaxvlm launch gke` writes it
            "JAXVLM_COORDINATOR": f"127.0.0.1:{port}", "JAXVLM_NUM_PROCESSES": "2",
            "JAXVLM_PROCESS_ID": i, "JOB_COMPLETION_INDEX": i},
        "MPICH": lambda i: {  # PMI says no address
            "PMI_SIZE": "2", "PMI_RANK": i, "JAXVLM_COORDINATOR": f"127.0.0.1:{port}"},
    }[launcher]  # fmt: skip


LOOPBACK = ("torchrun", "SLURM", "Open MPI", "SkyPilot", "TPU slices", "Vertex AI", "xpk", "JobSet",
            "MPICH")  # fmt: skip
