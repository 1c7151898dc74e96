"""Where a process stands among those of its run, read from the variables that launchers set.

:func:`find_place` reads the first of these that says that there are several processes: the
``JAXVLM_*`` variables; Open MPI; torchrun (by ``TORCHELASTIC_RUN_ID``); a SLURM step; hosts of TPU
slices; Vertex AI; xpk without accelerators; and :data:`LAUNCHERS`. An inner launcher comes before
the one that it runs in: mpirun before SLURM.
"""

from __future__ import annotations

import json
import operator
import re
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

from jaxvlm.config import ConfigError

Environ = Mapping[str, str]
"""Environment variables by name."""

_OWN = ("JAXVLM_COORDINATOR", "JAXVLM_NUM_PROCESSES", "JAXVLM_PROCESS_ID")
_TPU_PORT = 8482  # JAX's own for the hosts of TPU slices
FIRST_PORT, _PORTS = 61440, 4096  # the last ephemeral ones


class ProcessPlace(NamedTuple):
    """A process's index, and how to reach the others."""

    coordinator: str
    """HOST:PORT on which process 0 listens."""
    num_processes: int
    process_id: int
    local_devices: list[int] | None
    """Indices of this machine's devices that this process uses; None: all."""


class LauncherVariables(NamedTuple):
    """The variables by which a launcher tells each process its place."""

    name: str
    num_processes: str
    """Variable of the number of processes."""
    process_id: str
    """Variable of this process's index."""
    coordinator: Callable[[Environ], str] = lambda _: ""
    """HOST:PORT of process 0; "" where nothing says it: then ``JAXVLM_COORDINATOR`` must."""
    local: tuple[str, str] = ("", "")
    """Variables of the number of processes on this machine, and of this one's index there."""


def _of_mpirun(environ: Environ) -> str:
    """Where mpirun of Open MPI 4 was called, in which process 0 is started."""
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")  # 15315.0;tcp://10.96.0.1,10.148.0.1:34911
    match = re.match(r"(\d+)\.\d+;tcp6?://\[?([^,\]]+?)[,\]:]", uri)
    return f"{match[2]}:{_port(match[1])}" if match else ""


def _of_torchrun(environ: Environ) -> str:
    """``MASTER_ADDR`` and a free port next to torchrun's own, which its agent listens on."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not (host and port):
        return ""
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"{host}:{_number(environ, 'MASTER_PORT') + agent}"


def _of_first_node(environ: Environ) -> str:
    nodes = environ.get("SKYPILOT_NODE_IPS", "").split()
    return f"{nodes[0]}:{_port(environ.get('SKYPILOT_TASK_ID', ''))}" if nodes else ""


def _of_jax(environ: Environ) -> str:
    """``JAX_COORDINATOR_ADDRESS``, whose port xpk leaves out."""
    host = environ.get("JAX_COORDINATOR_ADDRESS") or environ.get("JAX_COORDINATOR_IP", "")
    port = environ.get("JAX_COORDINATOR_PORT", "1234")
    return host if not host or re.search(r":\d+$", host) else f"{host}:{port}"


_MPIRUN = LauncherVariables(
    "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", _of_mpirun,
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)  # fmt: skip
_TORCHRUN = LauncherVariables(
    "torchrun", "WORLD_SIZE", "RANK", _of_torchrun, ("LOCAL_WORLD_SIZE", "LOCAL_RANK")
)
LAUNCHERS = (
    _MPIRUN,
    LauncherVariables("JAX's own variables", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", _of_jax),
    _TORCHRUN,
    LauncherVariables("xpk on GPUs", "NNODES", "NODE_RANK", _of_jax),
    LauncherVariables("SkyPilot", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", _of_first_node),
    LauncherVariables("PMI", "PMI_SIZE", "PMI_RANK", local=("MPI_LOCALNRANKS", "MPI_LOCALRANKID")),
    LauncherVariables("MVAPICH2", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    LauncherVariables("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    LauncherVariables("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    LauncherVariables("AWS Batch", "AWS_BATCH_JOB_NUM_NODES", "AWS_BATCH_JOB_NODE_INDEX"),
)
"""Launchers whose variables are a number of processes and an index."""

_OTHERS = (
    *("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"),
    *("MEGASCALE_NUM_SLICES", "CLUSTER_SPEC", "JAX_PROCESS_COUNT", "PROCESSES_IN_JOB"),
    *("JOB_COMPLETION_INDEX", "JOB_INDEX", "JAXVLM_DISTRIBUTED"),
)
VARIABLES = frozenset((*_OWN, *_OTHERS, *map(operator.attrgetter("num_processes"), LAUNCHERS)))
"""A process without any of these is alone."""


def find_place(environ: Environ) -> ProcessPlace | None:
    """Read this process's place from environment variables; None for a single process.

    Args:
        environ: names to values.

    Returns:
        The place, or ``None`` too where there are several processes that the variables do not
        join: :func:`refuse_alone` tells.

    Raises:
        ConfigError: the variables are incomplete or contradict each other.
    """
    if is_asked_alone(environ):
        return None
    given = [name for name in _OWN if environ.get(name)]
    if len(given) == len(_OWN):
        return _place(environ[_OWN[0]], environ, *_OWN[1:])
    # Where JAX is to find the processes, their numbers must be its own.
    found = _of_launcher(environ) if environ.get("JAXVLM_DISTRIBUTED") != "auto" else None
    if not given:
        return found if found and found.coordinator else None
    if given == [_OWN[0]] and found is not None:
        return found._replace(coordinator=environ[_OWN[0]])
    missing = ", ".join(name for name in _OWN if name not in given)
    raise ConfigError(
        f"{', '.join(given)} is set but {missing} is not: set all three or none, or the first "
        "alone where a launcher's variables say the others"
    )


def _of_launcher(environ: Environ) -> ProcessPlace | None:
    """The place that a launcher's variables say; its coordinator is "" where they don't say it."""
    if (place := _launched(_MPIRUN, environ)) is not None:
        return place
    is_torchrun = bool(environ.get("TORCHELASTIC_RUN_ID"))
    if is_torchrun and (place := _launched(_TORCHRUN, environ)) is not None:
        return place
    for outer in (_slurm, _tpu_slices, _vertex, _xpk):
        if (place := outer(environ)) is not None:
            return place
    places = (_launched(launcher, environ) for launcher in LAUNCHERS)
    return next((place for place in places if place is not None), None)


def _launched(launcher: LauncherVariables, environ: Environ) -> ProcessPlace | None:
    if not environ.get(launcher.num_processes) or _number(environ, launcher.num_processes) < 2:
        return None
    address = launcher.coordinator(environ)
    if launcher.num_processes == "NNODES" and not address:
        return None  # a common name, of other programs too
    if not environ.get(launcher.process_id):
        if not address:
            return None
        raise ConfigError(
            f"{launcher.num_processes}={environ[launcher.num_processes]} is set but "
            f"{launcher.process_id} is not: {launcher.name} sets both; set JAXVLM_COORDINATOR, "
            "JAXVLM_NUM_PROCESSES and JAXVLM_PROCESS_ID by hand"
        )
    return _place(address, environ, launcher.num_processes, launcher.process_id, *launcher.local)


def _place(
    coordinator: str, environ: Environ, count: str, index: str, local: str = "", own: str = ""
) -> ProcessPlace | None:
    """The place by the names of its variables; ``None`` for one process."""
    number, process = _number(environ, count), _number(environ, index)
    if process >= number:
        raise ConfigError(f"{index} is {process}; it must be below {number} ({count})")
    several = bool(local and environ.get(local) and _number(environ, local) > 1)
    devices = [_number(environ, own)] if several else None
    return ProcessPlace(coordinator, number, process, devices) if number > 1 else None


def _slurm(environ: Environ) -> ProcessPlace | None:
    """Of a SLURM step: SLURM_STEP_NUM_TASKS exists only under srun; SLURM_NTASKS also in the batch
    script, where one process would wait for peers that are never started.
    """
    if not environ.get("SLURM_STEP_NUM_TASKS") or _number(environ, "SLURM_STEP_NUM_TASKS") < 2:
        return None
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    port = FIRST_PORT + _number(environ, "SLURM_JOB_ID") % _PORTS
    place = _place(f"{first_host(nodes)}:{port}", environ, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
    # JAX's own detection would give each process one GPU; jaxvlm runs one process a node.
    tasks = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    several = any(int(count) > 1 for count in tasks)  # of each node, as in 2(x3),1
    return place and place._replace(
        local_devices=[_number(environ, "SLURM_LOCALID")] if several else None
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: ``gpu[07-09,12],login`` -> ``gpu07``.

    Raises:
        ConfigError: the list is empty.
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    if not first:
        raise ConfigError("SLURM_STEP_NODELIST is empty: start the command with srun")
    return re.sub(r"\[([^\]\-,]+)[^\]]*\]", r"\1", first[0])


def _tpu_slices(environ: Environ) -> ProcessPlace | None:
    """Of a host of TPU slices, as GKE describes it; process numbers as JAX's own."""
    hosts = tpu_hosts(environ)
    slices = _number(environ, "MEGASCALE_NUM_SLICES") if environ.get("MEGASCALE_NUM_SLICES") else 1
    if not hosts or len(hosts) * slices < 2:
        return None
    needed = ["TPU_WORKER_ID"] if len(hosts) > 1 else []
    needed += ["MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"] if slices > 1 else []
    if missing := [name for name in needed if not environ.get(name)]:
        said = f"{len(hosts)} hosts a slice (TPU_WORKER_HOSTNAMES)"
        said += f" and MEGASCALE_NUM_SLICES={slices}" if slices > 1 else ""
        raise ConfigError(
            f"{said}, but {', '.join(missing)} is not set: several processes, which nothing "
            "joins; set it, or JAXVLM_COORDINATOR, JAXVLM_NUM_PROCESSES and JAXVLM_PROCESS_ID"
        )
    worker = _number(environ, "TPU_WORKER_ID") if len(hosts) > 1 else 0
    own = _number(environ, "MEGASCALE_SLICE_ID") if slices > 1 else 0
    for name, index, number in (("TPU_WORKER_ID", worker, len(hosts)),
                                ("MEGASCALE_SLICE_ID", own, slices)):  # fmt: skip
        if index >= number:
            raise ConfigError(f"{name} is {index}; it must be below {number}")
    first = environ["MEGASCALE_COORDINATOR_ADDRESS"] if slices > 1 else hosts[0]
    host = first.rpartition(":")[0] or first
    count, index = len(hosts) * slices, worker + own * len(hosts)
    return ProcessPlace(f"{host}:{_TPU_PORT}", count, index, None)


def tpu_hosts(environ: Environ) -> list[str]:
    """The hosts of this process's TPU slice, as far as the environment names them."""
    named = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES", "")
    return [host for host in named.split(",") if host]


def _vertex(environ: Environ) -> ProcessPlace | None:
    """Of a replica of a Vertex AI custom job: worker pool 0 has process 0, pool 1 the others."""
    text = environ.get("CLUSTER_SPEC", "")
    if not text:
        return None
    try:
        spec = json.loads(text)
        pools = [list(spec["cluster"].get(f"workerpool{i}", ())) for i in range(2)]
        pool, at = str(spec["task"]["type"]), int(spec["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"CLUSTER_SPEC is not what Vertex AI sets ({type(error).__name__}: {error}): it must "
            "be JSON with `cluster` and `task`; unset it outside of Vertex AI"
        ) from None
    replicas = [str(address) for of_pool in pools for address in of_pool]
    if len(replicas) < 2:
        return None
    if pool not in ("workerpool0", "workerpool1"):
        raise ConfigError(
            f"CLUSTER_SPEC: this replica is of {pool}, and a run's processes are the replicas of "
            "worker pools 0 and 1; give pool 2 (Reduction Server) a container of its own"
        )
    index = at + (len(pools[0]) if pool == "workerpool1" else 0)
    if index >= len(replicas):
        raise ConfigError(f"CLUSTER_SPEC: replica {at} of {pool} is not among its addresses")
    return ProcessPlace(replicas[0], len(replicas), index, None)


def _xpk(environ: Environ) -> ProcessPlace | None:
    """Of a pod that xpk starts on machines without accelerators."""
    if not environ.get("JAX_PROCESS_COUNT") or _number(environ, "JAX_PROCESS_COUNT") < 2:
        return None
    names = ("PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX")
    if not all(environ.get(name) for name in names) or not _of_jax(environ):
        return None
    job = _number(environ, "JOB_INDEX") if environ.get("JOB_INDEX") else 0
    in_job, index = (_number(environ, name) for name in names)
    count = _number(environ, "JAX_PROCESS_COUNT")
    if (process := job * in_job + index) >= count:
        raise ConfigError(
            f"JOB_INDEX={job} and JOB_COMPLETION_INDEX={index} of {in_job} a job make process "
            f"{process}; it must be below {count} (JAX_PROCESS_COUNT)"
        )
    return ProcessPlace(_of_jax(environ), count, process, None)


def refuse_alone(environ: Environ) -> None:
    """Refuse to work alone as one of several processes: each would do the whole work.

    ``JAXVLM_NUM_PROCESSES=1`` says that a process is meant to be alone.

    Args:
        environ: names to values, of a process that nothing has joined to others.

    Raises:
        ConfigError: a launcher's variable says that there are several processes, or is malformed.
    """
    if is_asked_alone(environ):
        return
    said = ""
    counts = [x[1:3] for x in LAUNCHERS if x.num_processes != "NNODES"]
    counts += [("JAX_PROCESS_COUNT", ""), ("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")]
    for name, index in (*counts, ("PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX")):
        if environ.get(name) and _number(environ, name) > 1:
            said = f"{name}={environ[name]}: this is one of {environ[name]} processes"
            said += f" (number {index}={environ[index]})" if environ.get(index) else ""
            break
    hosts = tpu_hosts(environ)
    if not said and len(hosts) > 1:
        said = f"TPU_WORKER_HOSTNAMES={','.join(hosts)}: this is one of {len(hosts)} processes"
    if not said and (place := _slurm(environ) or _vertex(environ)) is not None:
        name = "CLUSTER_SPEC" if environ.get("CLUSTER_SPEC") else "SLURM_STEP_NUM_TASKS"
        said = f"{name}={environ[name]}: this is one of {place.num_processes} processes"
    said = said or _jobset(environ) or _slurm_without_step(environ)
    if said:
        raise ConfigError(
            f"{said}, but nothing joins them; set JAXVLM_COORDINATOR=HOST:PORT, "
            "JAXVLM_NUM_PROCESSES and JAXVLM_PROCESS_ID in each (JAXVLM_DISTRIBUTED=auto on TPU "
            "slices, srun under SLURM), or JAXVLM_NUM_PROCESSES=1 to work alone"
        )


def is_asked_alone(environ: Environ) -> bool:
    """Whether ``JAXVLM_NUM_PROCESSES=1`` says that this process works alone."""
    own = environ.get("JAXVLM_PROCESS_ID", "0")
    return environ.get("JAXVLM_NUM_PROCESSES") == "1" and own in ("", "0")


def _jobset(environ: Environ) -> str:
    """What says that this may be one of a JobSet's pods; "" where it is the only one."""
    if not environ.get("JOB_COMPLETION_INDEX"):
        return ""
    names = [n for n in ("JOBSET_NAME", "REPLICATED_JOB_NAME") if environ.get(n)]
    others = [n for n in ("JOB_COMPLETION_INDEX", "JOB_INDEX") if environ.get(n)]
    if above := [n for n in others if _number(environ, n) > 0]:
        return f"{above[0]}={environ[above[0]]}: this is one of several pods"
    # Neither Kubernetes nor JobSet says how many pods there are: xpk does, and TPUs' hosts do.
    if not names or environ.get("PROCESSES_IN_JOB") or environ.get("TPU_WORKER_HOSTNAMES"):
        return ""
    return f"{names[0]}={environ[names[0]]}: this is a pod of a JobSet, of any number"


def _slurm_without_step(environ: Environ) -> str:
    """What says that SLURM has several tasks, of which srun did not start this process.

    A shell of ``salloc`` has no SLURM_PROCID; a step of one task is meant to be one.
    """
    if environ.get("SLURM_STEP_NUM_TASKS") or not environ.get("SLURM_PROCID"):
        return ""
    if not environ.get("SLURM_NTASKS") or _number(environ, "SLURM_NTASKS") < 2:
        return ""
    return f"SLURM_NTASKS={environ['SLURM_NTASKS']}: the job has several tasks"


def _port(name: str) -> int:
    """A port that jobs of other names seldom have."""
    return FIRST_PORT + zlib.crc32(name.encode()) % _PORTS


def _number(environ: Environ, name: str) -> int:
    value = environ.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name} must be a number, not {value!r}")
    return int(value)
