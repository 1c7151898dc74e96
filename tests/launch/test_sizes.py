"""With how many nodes an elastic job can go on."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from jaxvlm.cli.main import run as cli
from jaxvlm.config import Config, ConfigError, DataConfig, EncoderConfig, MeshConfig
from jaxvlm.launch import plan_check
from jaxvlm.planner.hardware.machine import parse

RECIPE = str(pathlib.Path(__file__).resolve().parents[2] / "configs" / "quickstart.py")


def sizes(machine, processes, least, rows=48, **settings):
    config = Config(data=dataclasses.replace(DataConfig(), train="x", batch_size=rows), **settings)
    return plan_check.sizes(config, "", parse(machine), processes, least, plan=False)


@pytest.mark.parametrize(
    "machine, processes, rows, allowed",
    [
        ("cpu:4", 4, 12, (4, 3, 2, 1)),
        ("cpu:4", 4, 32, (4, 2, 1)),
        ("cpu:8", 4, 24, (4, 3, 2, 1)),
        ("h200:32", 4, 96, (4, 3, 2, 1)),
        ("h200:32", 4, 64, (4, 2, 1)),
        ("h200:8", 8, 48, (8, 6, 4, 3, 2, 1)),  # what is left, not what can be rented
    ],
)
def test_the_batch_decides(machine, processes, rows, allowed):
    found = sizes(machine, processes, 1, rows)
    assert found.allowed == allowed
    assert found.refused.keys() == set(range(1, processes)) - set(allowed)
    assert all("is no multiple of" in why for why in found.refused.values())


def test_the_encoders_devices_do_too():
    encoder = EncoderConfig(devices=4)
    found = sizes("cpu:16", 4, 1, encoder=encoder)
    assert found.allowed == (4, 2)
    assert "each process gives the encoder as many" in found.refused[3]
    with pytest.raises(ConfigError, match="4 of 4 devices"):
        sizes("cpu:8", 4, 2, encoder=encoder)


@pytest.mark.parametrize(
    "least, settings, why",
    [
        (0, {}, "--min_nodes=0: the job has 4; name 1 to 3"),
        (4, {}, "--min_nodes=4: the job has 4; name 1 to 3"),
        (1, {"mesh": MeshConfig(island=2)}, "each island has a state of its own"),
        (1, {"mesh": MeshConfig(data=4)}, "can't go on with fewer: with 3: .*does not fit 3"),
        (1, {"rows": 50}, "batch_size=50 is no multiple of 4 data shards"),
        (1, {"encoder": EncoderConfig(devices=-1)}, "name them"),
    ],
)
def test_what_is_refused(least, settings, why):
    with pytest.raises(ConfigError, match=why):
        sizes("cpu:4", 4, least, **settings)


def rendered(capsys, target, devices, *more):
    words = ["launch", target, f"--devices={devices}", "--skip_plan", "--dry_run", *more]
    train = ["--", "train", f"--config={RECIPE}:smoke", "--workdir=w"]
    code = cli([*words, *train, "--config.data.batch_size=96"])
    said = capsys.readouterr()
    return said.out if not code else said.err


def test_the_nodes_are_the_targets(capsys):
    text = rendered(capsys, "slurm", "h200:32", "--min_nodes=2")
    assert "JAXVLM_NODES='4 3 2'" in text and "#SBATCH --no-kill" in text
    assert "SIZES, GPUS, PORT, RESTARTS, AGAIN = (4, 3, 2, 1), 8," in rendered(
        capsys, "ray", "h200:32", "--min_nodes=1"
    )
    assert "--sizes=4,3,2 --devices=2" in rendered(
        capsys, "local", "h200:8", "--processes=4", "--min_nodes=2"
    )
    for target in ("slurm", "ray"):  # one node, whatever devices it has
        why = rendered(capsys, target, "h200:8", "--min_nodes=1")
        assert "--min_nodes=1: the job has 1; there are no fewer" in why
    assert "JAXVLM_NODES" not in rendered(capsys, "slurm", "h200:32").split("set --")[0]


@pytest.mark.parametrize(
    "target, flag, why",
    [
        ("gke", "--min_nodes=1", "launch gke waits for all of its nodes; launch local, slurm, ray"),
        ("local", "--name=x", "launch local writes no files"),
        ("local", "--output=x", "launch local writes no files"),
        ("slurm", "--processes=2", "--processes is for launch local"),
    ],
)
def test_flags_that_a_target_does_not_read(capsys, target, flag, why):
    assert why in rendered(capsys, target, "cpu:4", flag)
