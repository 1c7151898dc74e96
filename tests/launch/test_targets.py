"""Jobs as their targets take them: machines, restarts, refusals, and one call of the tool."""

from __future__ import annotations

import ast
import json
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys

import pytest
import yaml

from jaxvlm.cli.main import run as cli
from jaxvlm.config import Config, ConfigError, StrategyConfig
from jaxvlm.launch import targets
from jaxvlm.launch.job import Job, check_name, environment_of
from jaxvlm.parallel.distributed.places import find_place
from jaxvlm.planner.hardware.machine import parse

ARGUMENTS = ("train", "--config=r.py:a b", "--workdir=/runs/first")
OWN = {
    "slurm": {"partition": "low"},
    "tpu": {"tpu": "pod", "zone": "z", "install": "jaxvlm[tpu]"},
    "queued": {"zone": "z", "spot": True},
    "gke": {"claim": "runs", "queue": "q"},
    "xpk": {"cluster": "c", "zone": "z"},
    "vertex": {"region": "r"},
    "sky": {"install": "jaxvlm[tpu]"},
    "ray": {},
}
MACHINES = {"slurm": "h200:16", "vertex": "h200:16", "sky": "h200:16", "ray": "h200:16",
            "tpu": "v5e:16"}  # fmt: skip
IMAGES = ("queued", "gke", "xpk", "vertex")


def job(devices, image="", **more):
    named = parse(devices, "bfloat16")
    return Job("first", ARGUMENTS, named, image, (("A", "b 'c"),), **more)


def rendered(target, devices="", **own):
    image = "x/y:1" if target in IMAGES else ""
    asked = job(devices or MACHINES.get(target, "2xv5e:4x4"), image)
    return targets.render(target, asked, **OWN[target] | own)


def text_of(target, devices="", **own):
    return next(iter(rendered(target, devices, **own).files.values()))


@pytest.mark.parametrize("target", [name for name in targets.TARGETS if name != "local"])
def test_the_command_and_its_variables_arrive_whole(target, tmp_path):
    made = rendered(target)
    text = next(iter(made.files.values()))
    call = targets.written(made, tmp_path).command
    assert all((tmp_path / name).read_text() == said for name, said in made.files.items())
    if target in ("gke", "vertex"):
        spec = yaml.safe_load(text)
        containers = _containers(spec)
        assert containers
        for container in containers:
            assert container["command"] == ["jaxvlm", *ARGUMENTS]
            assert {"name": "A", "value": "b 'c"} in container["env"]
    elif target == "ray":
        assigned = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").isupper()
        }
        assert assigned["COMMAND"] == ["jaxvlm", *ARGUMENTS]
        assert assigned["ENVIRONMENT"]["A"] == "b 'c"
    else:
        script = yaml.safe_load(text)["run"] if target == "sky" else text
        assert _run(script, tmp_path, target) == [*ARGUMENTS, "b 'c"]
    if target == "tpu":  # the script itself
        assert f"--command={text}" in call
    elif target == "xpk":  # which puts it between double quotes, as it is
        command = next(word for word in call if word.startswith("--command="))
        assert not set(command) & set('"\\\n$')
        assert _run(command.removeprefix("--command="), tmp_path, target) == [*ARGUMENTS, "b 'c"]
    else:
        assert any(next(iter(made.files)) in word for word in call)


def _containers(spec):
    if "workerPoolSpecs" in spec:
        return [pool["containerSpec"] for pool in spec["workerPoolSpecs"]]
    return [
        container
        for jobs in spec["spec"]["replicatedJobs"]
        for container in jobs["template"]["spec"]["template"]["spec"]["containers"]
    ]


def _run(script, folder, target):
    """The words that a script gives to jaxvlm, and A; as a stub of it prints them."""
    out = folder / "said.json"
    stub = f'#!{sys.executable}\nimport json, os, sys\nwords = sys.argv[1:]\n' \
           f'open({str(out)!r}, "w").write(json.dumps([*words, os.environ["A"]]))\n'  # fmt: skip
    docker = '#!/bin/bash\nwhile [ "$1" != jaxvlm ]; do shift; done\nexec "$@"\n'
    nothing = "#!/bin/bash\n"
    python = f'#!/bin/bash\n[ "$1 $2" = "-m pip" ] || exec {sys.executable} "$@"\n'
    stubs = {"jaxvlm": stub, "docker": docker, "uv": nothing, "python3": python}
    for name, body in (stubs | {"gcloud": nothing}).items():
        (folder / name).write_text(body)
        (folder / name).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "JAXVLM_SRUN": "env"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_pods_of_gpus_join_by_their_index():
    spec = yaml.safe_load(text_of("gke", "h200:16"))["spec"]
    (jobs,) = spec["replicatedJobs"]
    work = jobs["template"]["spec"]
    assert (jobs["replicas"], work["completions"], work["parallelism"]) == (1, 2, 2)
    (container,) = _containers({"spec": spec})
    env = {item["name"]: item.get("value", "1") for item in container["env"]}
    place = find_place(env)
    assert place == ("first-workers-0-0.first:61440", 2, 1, None)
    assert spec["network"]["enableDNSHostnames"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_pods_of_tpu_slices_are_a_job_a_slice():
    spec = yaml.safe_load(text_of("gke", "2xv5e:4x4"))["spec"]
    (jobs,) = spec["replicatedJobs"]
    work = jobs["template"]["spec"]
    assert (jobs["replicas"], work["completions"]) == (2, 4)
    pod = work["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    names = {item["name"] for item in pod["containers"][0]["env"]}
    assert not any(name.startswith(("JAXVLM_COORD", "JAXVLM_NUM", "JAXVLM_PROC")) for name in names)
    sizes = (
        ("v5e:2x4", 1, 8),
        ("v6e:16", 4, 4),
        ("v5p:2x2x2", 2, 4),
        ("7x:2x2x2", 2, 4),
    )
    for devices, pods, chips in sizes:
        small = yaml.safe_load(text_of("gke", devices))["spec"]["replicatedJobs"][0]
        spec = small["template"]["spec"]
        limits = spec["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert (spec["completions"], limits) == (pods, {"google.com/tpu": chips})


def test_errors_end_a_jobset_and_lost_pods_start_it_again():
    spec = yaml.safe_load(text_of("gke", "h200:16"))["spec"]
    work = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = work["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 2]
    assert spec["failurePolicy"]["maxRestarts"] == 20 and work["backoffLimit"] == 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet" and rule["onJobFailureReasons"] == ["PodFailurePolicy"]


@pytest.mark.parametrize(
    ("ends", "tries", "status"),
    [
        ([0], 1, 0),
        ([75, 0], 2, 0),
        ([137, 0], 2, 0),
        ([2], 1, 2),
        ([75, 1], 2, 1),
        ([75] * 9, 3, 75),  # all of them short: another host ended for good
    ],
)
def test_a_queued_host_runs_again_while_a_process_is_lost(ends, tries, status, tmp_path):
    asked = job("2xv5e:4x4", "x/y:1", restarts=5)
    text = next(iter(targets.render("queued", asked, zone="z").files.values()))
    log = tmp_path / "log"
    (tmp_path / "ends").write_text(" ".join(map(str, ends)))
    stub = f'#!/bin/bash\necho >> {log}\nexit $(cut -d" " -f$(wc -l < {log}) {tmp_path}/ends)\n'
    (tmp_path / "docker").write_text(stub)
    (tmp_path / "docker").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", text], env=env, capture_output=True)
    assert (done.returncode, len(log.read_text())) == (status, tries)


@pytest.mark.parametrize("target", [name for name in targets.TARGETS if name != "local"])
def test_a_run_that_is_stopped_is_started_again(target):
    """By targets that can't see that it was; SLURM's script does, and on a TPU VM a person does."""
    asks = "JAXVLM_STOPPED_STATUS" in text_of(target)
    assert asks == (target not in ("slurm", "tpu"))


def test_a_target_without_files_is_given_the_recipe(tmp_path):
    for target in ("tpu", "queued", "sky", "ray"):
        asked = job(MACHINES.get(target, "2xv5e:4x4"))._replace(recipe="x = 'é $HOME'\n")
        own = OWN[target] | ({"install": "jaxvlm"} if target == "queued" else {})
        text = next(iter(targets.render(target, asked, **own).files.values()))
        assert asked.command[2] == "--config=/tmp/jaxvlm-first/recipe.py:a b"
        if target == "ray":
            assert repr(asked.recipe) in text and repr(asked.shipped) in text
            continue
        script = yaml.safe_load(text)["run"] if target == "sky" else text
        said = _run(script, tmp_path, target)
        assert said[1] == "--config=/tmp/jaxvlm-first/recipe.py:a b"
        assert pathlib.Path(asked.shipped).read_text() == asked.recipe
        shutil.rmtree(pathlib.Path(asked.shipped).parent)


@pytest.mark.parametrize("given", [("--config=a/r.py:x:y",), ("--config", "a/r.py:x:y")])
def test_the_recipes_path_is_replaced_however_it_is_given(given):
    asked = job("v5e:16")._replace(recipe="x")
    words = asked._replace(arguments=("train", *given, "--config.data.train=a/r.py")).command
    assert "".join(words[2:-1]) == "".join(given).replace("a/r.py", asked.shipped)
    assert words[-1] == "--config.data.train=a/r.py"


def test_sky_sets_up_what_is_to_be_installed():
    assert "uv pip install" in yaml.safe_load(text_of("sky"))["setup"]


def test_braces_of_a_command_stay():
    asked = job("v5e:16")._replace(arguments=("train", "--workdir=/r/{folder}", "--config.x={}"))
    made = targets.render("tpu", asked, **OWN["tpu"]).with_files_in("/jobs")
    assert any("/r/{folder}" in word and "--config.x={}" in word for word in made.command)


def test_xpk_is_told_which_status_starts_again():
    assert "--restart-on-exit-codes=75" in rendered("xpk").command


def test_slurm_asks_for_the_machine():
    text = text_of("slurm", "h200:16", time="1:00:00")
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    for option in ("nodes=2", "gpus-per-node=8", "time=1:00:00", "partition=low", "job-name=first"):
        assert head.count(f"#SBATCH --{option}") == 1
    assert head.count("#SBATCH --cpus-per-task=64") == 1
    assert "#SBATCH --cpus-per-task=3\n" in text_of("slurm", "h200:16", cpus=3)
    on_cpus = text_of("slurm", "cpu:8")
    assert "--account" not in text and "gpus-per-node" not in on_cpus
    assert "#SBATCH --cpus-per-task=8\n" in on_cpus


def test_tpus_by_their_accelerator_types():
    from jaxvlm.launch.tpu_vms import accelerator_type

    types = {"v4:2x2x2": "v4-16", "v5e:16": "v5litepod-16", "v5p:4x4x4": "v5p-128",
             "2xv6e:8": "v6e-8", "7x:2x2x2": "tpu7x-16"}  # fmt: skip
    assert {name: accelerator_type(job(name)) for name in types} == types
    call = rendered("queued", "2xv5e:4x4").command
    assert {"--accelerator-type=v5litepod-16", "--node-count=2", "--spot"} <= set(call)


def test_vertex_pools():
    spec = yaml.safe_load(text_of("vertex", "h200:32"))
    assert [pool["replicaCount"] for pool in spec["workerPoolSpecs"]] == [1, 3]
    ddp = Config(strategy=StrategyConfig(name="ddp"))
    asked = yaml.safe_load(text_of("vertex", "h200:32", reduction_servers=4, config=ddp))
    assert asked["workerPoolSpecs"][2]["replicaCount"] == 4
    assert "reductionserver" in asked["workerPoolSpecs"][2]["containerSpec"]["imageUri"]


def test_a_ray_program_ends_as_its_processes_do(tmp_path):
    """Its loop, with Ray's part of it replaced."""
    text = text_of("ray")
    loop = text[text.index("nodes = SIZES[0]") :]
    size_of = text[text.index("def size_of") : text.index("def alive")]
    for sizes, ends, status, nodes in (
        ((2,), [([0, 0], 0)], 0, [2]),
        ((2,), [([75, 137], 0), ([0, 0], 0)], 0, [2, 2]),
        ((2,), [([75, 75], 1), ([0, 0], 0)], 0, [2, 2]),  # waits for the second
        ((4, 2), [([75] * 4, 1), ([0, 0], 0)], 0, [4, 2]),
        ((4, 3, 2), [([75] * 4, 1), ([75] * 3, 0), ([0] * 4, 0)], 0, [4, 3, 4]),  # one came back
        ((2,), [([2, 75], 0)], 2, [2]),
        ((1,), [([75], 0)] * 30, 75, [1] * 21),
    ):
        asked, answers = [], iter(ends)

        def once(nodes, asked=asked, answers=answers):
            asked.append(nodes)
            return next(answers)

        names = {"once": once, "RESTARTS": 20, "AGAIN": 75, "SIZES": sizes, "sys": sys}
        names["alive"] = lambda sizes=sizes: sizes[0]  # the lost one is not known to be dead yet
        exec(size_of, names)
        with pytest.raises(SystemExit) as end:
            exec(loop, names)
        assert end.value.code == status and asked == nodes


REFUSED = [
    ("slurm", "v5e:16", {}, "SLURM has no TPU slices"),
    ("tpu", "h200:8", {}, "takes TPUs, such as --devices=v5e:16"),
    ("tpu", "2xv5e:4x4", {}, "takes one slice"),
    ("tpu", "v5e:16", {"tpu": ""}, "needs --tpu, e.g."),
    ("queued", "h200:8", {}, "takes TPUs"),
    ("gke", "rtx4090:8", {}, "GKE has no node with a rtx4090"),
    ("xpk", "rtx4090:8", {}, "xpk has no rtx4090"),
    ("xpk", "v5e:16", {"cluster": ""}, "needs --cluster"),
    ("vertex", "v5e:16", {}, "TPU slices are for launch queued, gke or xpk"),
    ("vertex", "h200:16", {"region": ""}, "needs --region"),
    ("vertex", "h200:4", {}, "a host has 8 h200, not 4"),
    ("sky", "2xv5e:4x4", {}, "takes one TPU slice"),
    ("ray", "v5e:16", {}, "takes GPUs or CPUs"),
]


@pytest.mark.parametrize(("target", "devices", "own", "why"), REFUSED)
def test_what_a_target_can_not_run_is_refused(target, devices, own, why):
    with pytest.raises(ConfigError, match=why):
        rendered(target, devices, **own)


@pytest.mark.parametrize(
    ("devices", "name", "why"),
    [
        ("h200:16", "fsdp", "name='fsdp' does not all-reduce gradients whole"),
        ("h200:8", "ddp", "one host has nothing to send"),
    ],
)
def test_reduction_servers_with_nothing_to_sum_are_refused(devices, name, why):
    config = Config(strategy=StrategyConfig(name=name))
    with pytest.raises(ConfigError, match=why):
        rendered("vertex", devices, reduction_servers=1, config=config)
    with pytest.raises(ConfigError, match="Reduction Server"):
        rendered("vertex", "h200:16", reduction_servers=1)


@pytest.mark.parametrize("name", ["A", "1a", "a_b", "a-", "", "a" * 41])
def test_names_that_schedulers_would_not_take(name):
    with pytest.raises(ConfigError, match="--name="):
        check_name(name)


def test_variables():
    cpu, gpu = parse("cpu:1", "float32"), parse("h200:8", "bfloat16")
    assert environment_of(["A=b=c", "D="], cpu) == (("A", "b=c"), ("D", ""))
    assert environment_of(["A=b"], gpu) == (("JAX_PLATFORMS", "cuda,cpu"), ("A", "b"))
    assert environment_of(["JAX_PLATFORMS=cuda"], gpu) == (("JAX_PLATFORMS", "cuda"),)
    for bad in ("A", "=b", "1=a", "a b=c"):
        with pytest.raises(ConfigError, match="give NAME=VALUE"):
            environment_of([bad], cpu)


TRAIN = ["--", "train", "--config=configs/quickstart.py", "--workdir=/runs/first"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ([], "launch needs a target: local, slurm, tpu"),
        (["moon"], "launch needs a target"),
        (["slurm", "--devices=h200:16"], "needs a command of jaxvlm after --"),
        (["slurm", *TRAIN], "launch needs --devices"),
        (["slurm", "--devices=h200:9", *TRAIN], "nearest: 8 or 16"),
        (["slurm", "--devices=h200:16", "--zone=z", *TRAIN], "--zone is for launch tpu, queued"),
        (["slurm", "--devices=h200:16", "--image=x", *TRAIN], "runs what is installed"),
        (["slurm", "--devices=h200:16", "--", "dance"], "'dance' is no command"),
        (["slurm", "--devices=h200:16", "--", "eval", "--chekpoint=x"], "chekpoint"),
        (["slurm", "--devices=h200:16", "--account=a\n#SBATCH --x", *TRAIN], "give one line"),
        (["sky", "--devices=h200:16", "--restarts=3", *TRAIN], "does not count restarts"),
        (["slurm", "--devices=h200:16", "--", "train", "--workdir=/r"], "needs --config=FILE"),
        (["slurm", "--devices=h200:16", *TRAIN[:3]], "needs --workdir=DIR"),
        (["slurm", "--devices=h200:16", *TRAIN, "--config.optim.lr=1"], "lr"),
        (["slurm", "--devices=h200:16", *TRAIN, "--config.mesh.fsdp=3"], "does not fit 16 devices"),
    ],
)
def test_a_bad_call_says_why_in_one_line(args, why, capsys):
    assert cli(["launch", *args]) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1


def test_a_job_that_would_not_find_jaxvlm_is_not_submitted(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\ntouch {tmp_path}/submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    words = ["launch", "slurm", "--devices=cpu:1", f"--output={tmp_path / 'jobs'}", "--", "data"]
    assert cli([*words, "check", "x.jsonl"]) == 2
    assert "jaxvlm is not on the PATH, which the job inherits" in capsys.readouterr().err
    assert not (tmp_path / "submitted").exists() and not (tmp_path / "jobs").exists()


def test_a_job_is_given_to_the_tool_once(tmp_path, monkeypatch, capsys):
    tool, log = tmp_path / "sbatch", tmp_path / "log"
    tool.write_text(f'#!/bin/bash\necho "$@" >> {log}\nexit ${{STATUS:-0}}\n')
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    (tmp_path / "jaxvlm").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    jobs = tmp_path / "jobs" / "first"
    output = f"--output={tmp_path / 'jobs'}"
    command = ["launch", "slurm", "--devices=h200:16", "--name=first", output, *TRAIN]
    assert cli([*command[:2], "--dry_run", *command[2:]]) == 0
    assert not log.exists() and not jobs.exists()
    said = capsys.readouterr().out
    assert "planned: it fits" in said and f"# sbatch {jobs}/first.sbatch" in said
    assert cli(command) == 0
    assert log.read_text() == f"{jobs}/first.sbatch\n"
    assert shlex.split((jobs / "first.sbatch").read_text(), comments=True)
    monkeypatch.setenv("STATUS", "3")
    assert cli(command) == 1  # as the tool says, and the job's file is there to look at
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli(command) == 2
    assert "sbatch is not on the PATH" in capsys.readouterr().err


def test_a_run_that_does_not_fit_is_not_launched(capsys):
    devices = ["launch", "slurm", "--devices=h200:16", "--dry_run"]
    uneven = [*TRAIN, "--config.data.batch_size=24"]
    assert cli([*devices, *uneven]) == 2
    said = capsys.readouterr().err
    assert "24 rows" in said and "do not go together" in said and "this fits" in said
    assert cli([*devices, "--skip_plan", *uneven]) == 0
    three = [
        "launch",
        "local",
        "--devices=cpu:3",
        "--dry_run",
        *TRAIN,
        "--config.data.batch_size=16",
    ]
    assert cli(three) == 2
    assert "no mesh of 3 devices does, so take another batch size" in capsys.readouterr().err
    wide = ["--config.model.decoder.width=8192", "--config.model.decoder.depth=60",
            "--config.model.decoder.mlp_dim=28672", "--config.strategy.name=ddp"]  # fmt: skip
    assert cli([*devices, *TRAIN, *wide]) == 2
    said = capsys.readouterr().err
    assert "a device has 141" in said and "this fits" in said and "strategy.name=" in said
    # What would fit with another remat or more microbatches does not as it is written.
    large = ["--config.model.decoder.width=2048", "--config.model.decoder.depth=24",
             "--config.model.decoder.mlp_dim=8192", "--config.strategy.name=fsdp",
             "--config.data.batch_size=512", "--config.data.max_length=2048"]  # fmt: skip
    assert cli([*devices, *TRAIN, *large]) == 2
    said = capsys.readouterr().err
    assert "this fits" in said and ("remat=" in said or "microbatches=" in said)
    assert cli(["launch", "slurm", "--devices=h200:1", "--dry_run", *TRAIN, *wide]) == 2
    assert "--devices=h200:" in capsys.readouterr().err
