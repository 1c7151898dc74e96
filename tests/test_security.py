"""What a foreign checkpoint, or a link in a workdir, must not lead to: docs/security.md."""

from __future__ import annotations

import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax._src.lib import _jax
from PIL import Image
from safetensors.numpy import save_file

from jaxvlm.checkpoint import run_record
from jaxvlm.cli import main
from jaxvlm.config import ConfigError
from jaxvlm.data.images import processor
from jaxvlm.data.sources import conversation_formats
from jaxvlm.hf import exporter, pretrained, safetensors
from jaxvlm.inference import prediction_grid

ROOT = pathlib.Path(__file__).parents[1]


def test_no_code_of_a_checkpoint_runs(tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "foreign.py").write_text(f"open({str(marker)!r}, 'w')\nclass Processor: pass\n")
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Foreign",
                "auto_map": {"AutoImageProcessor": "foreign.Processor"},
            }
        )
    )
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code"):
        processor._load_processor(folder)
    assert not marker.exists()


def test_every_automatic_class_is_told_not_to_run_code():
    calls = re.compile(r"\bAuto\w+\.from_pretrained\((?:[^()]|\([^()]*\))*\)")
    files = [p for room in ("jaxvlm", "benchmarks") for p in (ROOT / room).rglob("*.py")]
    found = [call for file in files for call in calls.findall(file.read_text())]
    assert found and all("trust_remote_code=False" in call for call in found)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/tmp/x.safetensors", "a/../../x.safetensors", "..", 3, None]
)
def test_a_shard_outside_of_the_folder_is_refused(tmp_path, shard):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "x.safetensors")
    (folder / safetensors.INDEX).write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(ConfigError, match="names a shard"):
        safetensors.read_layout(folder)


def test_a_recorded_layout_outside_of_the_folder_is_refused(tmp_path):
    layout = {"w": ["../x.safetensors", "F32", [2]]}
    (tmp_path / pretrained.LAYOUT).write_text(json.dumps(layout))
    source = pretrained.Source(tmp_path, tmp_path, {}, None)
    with pytest.raises(ConfigError, match="names a shard"):
        exporter.saved_layout(source)


@pytest.mark.parametrize("linked", ["notes.txt", "additional_chat_templates", "1_Pooling"])
def test_a_link_out_of_a_checkpoint_is_not_copied(tmp_path, linked):
    folder, secret = tmp_path / "model", tmp_path / "private" / "secret.txt"
    folder.mkdir()
    secret.parent.mkdir()
    secret.write_text("secret")
    modules = [{"path": "", "type": "Transformer"}, {"path": "1_Pooling", "type": "Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / linked).symlink_to(secret if "." in linked else secret.parent)
    with pytest.raises(ConfigError, match="outside of the checkpoint's folder"):
        exporter.copy_files(folder, tmp_path / "out")
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file() and "secret" in p.name]


def test_links_into_the_hub_cache_are_copied_as_files(tmp_path):
    cache = tmp_path / "models--owner--name"
    folder = cache / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "0123").write_text("{}")
    (folder / "config.json").symlink_to("../../blobs/0123")
    (folder / "inside.json").symlink_to("config.json")
    exporter.copy_files(folder, tmp_path / "out")
    for name in ("config.json", "inside.json"):
        copied = tmp_path / "out" / name
        assert copied.read_text() == "{}" and not copied.is_symlink()


def test_a_linked_lock_leaves_its_target_alone(tmp_path):
    target = tmp_path / "precious"
    target.write_text("keep")
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / ".lock").symlink_to(target)
    with pytest.raises(ConfigError, match="symbolic link"), run_record.locked(workdir):
        pass
    assert target.read_text() == "keep"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "wandb_id", "tensorboard", "checkpoints", "text/hf.tmp", "new/a.png"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_out_of_a_workdir_is_refused(tmp_path, name, exists):
    target, workdir = tmp_path / "precious", tmp_path / "run"
    if exists:
        target.mkdir()
    (workdir / name).parent.mkdir(parents=True)
    (workdir / name).symlink_to(target)
    with pytest.raises(ConfigError, match="outside of the run's folder"):
        run_record.locked(workdir).__enter__()
    assert target.exists() == exists and not (exists and list(target.iterdir()))


def test_links_inside_of_a_workdir_and_a_linked_workdir_are_used(tmp_path):
    (tmp_path / "disk" / "wandb" / "run-1").mkdir(parents=True)
    (tmp_path / "disk" / "wandb" / "latest").symlink_to("run-1")
    (tmp_path / "run").symlink_to("disk")
    with run_record.locked(tmp_path / "run"):
        assert (tmp_path / "disk" / ".lock").is_file()


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/1"])
def test_a_pipe_in_a_workdir_is_refused(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name} is a pipe"):
        run_record.locked(tmp_path).__enter__()


@pytest.mark.parametrize("name", ["grid.png", "grid.jpg", "grid"])
def test_a_grid_replaces_a_link_and_leaves_its_target_alone(tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("keep")
    (tmp_path / name).symlink_to(target)
    Image.new("RGB", (4, 4)).save(tmp_path / "image.png")
    cell = prediction_grid.Prediction(str(tmp_path / "image.png"), "what?", "a", "a")
    prediction_grid.draw_predictions([cell], tmp_path / name)
    row = prediction_grid.RetrievedRow(prediction_grid.GridItem("q"), [], [], [])
    prediction_grid.draw_retrieval([row], tmp_path / f"retrieval_{name}")
    assert target.read_text() == "keep" and not (tmp_path / name).is_symlink()
    with Image.open(tmp_path / name) as grid:
        assert grid.format == ("JPEG" if name.endswith("jpg") else "PNG")


def test_a_recipe_is_code(tmp_path, capsys):
    marker = tmp_path / "ran"
    (tmp_path / "recipe.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n")
    assert main.run(["data", "check", "x.jsonl", f"--config={tmp_path / 'recipe.py'}"]) == 2
    assert marker.exists() and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("how", ["absolute", "file://", ".."])
def test_data_names_any_image_that_can_be_read(tmp_path, how):
    outside = tmp_path / "private.png"
    Image.new("RGB", (4, 4)).save(outside)
    (tmp_path / "data").mkdir()
    name = {"absolute": str(outside), "file://": f"file://{outside}", "..": "../private.png"}[how]
    turns = [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "red"}]
    (tmp_path / "data" / "d.jsonl").write_text(json.dumps({"image": name, "conversations": turns}))
    records, problems = conversation_formats.read(str(tmp_path / "data" / "d.jsonl"))
    assert not problems and [str(r.images[0]) for r in records]
    assert pathlib.Path(records[0].images[0]).samefile(outside)


def test_a_lock_that_is_held_is_not_truncated(tmp_path):
    (tmp_path / ".lock").write_text("keep")
    with (
        run_record.locked(tmp_path),
        pytest.raises(ConfigError, match="another run"),
        run_record.locked(tmp_path),
    ):
        pass
    assert (tmp_path / ".lock").read_text() == "keep"


def test_jaxs_port_lets_anyone_in():
    """Should this fail, JAX has learned a password or an address: say so in docs/security.md."""
    client = (
        "import sys; from jax._src.lib import _jax; "
        "c = _jax.get_distributed_runtime_client(sys.argv[1], 0, init_timeout=10); c.connect(); "
        "c.key_value_set('stranger', 'x'); print(c.blocking_key_value_get('stranger', 1000))"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As jax.distributed.initialize does in process 0: its default is all addresses.
    service = _jax.get_distributed_runtime_service(f"[::]:{port}", 1)
    try:
        done = subprocess.run(
            [sys.executable, "-c", client, f"127.0.0.1:{port}"], capture_output=True, text=True
        )
    finally:
        service.shutdown()
    assert done.stdout == "x\n", done.stderr
    assert "coordinator_bind_address" in (jax.distributed.initialize.__doc__ or "")
