"""What a foreign checkpoint, or a link in a workdir, must not lead to: docs/security.md."""

from __future__ import annotations

import json
import pathlib
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError
from jaxvlm.data.images import processor
from jaxvlm.hf import exporter, pretrained, safetensors

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


def test_a_lock_that_is_held_is_not_truncated(tmp_path):
    (tmp_path / ".lock").write_text("keep")
    with (
        run_record.locked(tmp_path),
        pytest.raises(ConfigError, match="another run"),
        run_record.locked(tmp_path),
    ):
        pass
    assert (tmp_path / ".lock").read_text() == "keep"
