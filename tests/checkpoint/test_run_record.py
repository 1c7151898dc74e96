"""What is said of a ``config.json`` that is none."""

import dataclasses
import json

import pytest

from jaxvlm.checkpoint import run_changes, run_record
from jaxvlm.config import Config, ConfigError, Extension, LossConfig, ModelConfig, OptimConfig
from jaxvlm.train import metrics

NOT_OURS = [
    "[" * 100_000,
    "[]",
    "3",
    "null",
    '{"config": ' + "9" * 5_000 + "}",
    '{"config": []}',
    "{",
]


@pytest.mark.parametrize("text", NOT_OURS)
def test_a_damaged_config_is_one_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError):
        run_record.read_config(tmp_path)


@pytest.mark.parametrize("text", NOT_OURS)
def test_a_damaged_line_of_metrics_is_dropped(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{text}\n{{"step": 2}}\n{{"step": 3}}\n')
    metrics.keep_until(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_setting_that_older_runs_have_is_passed_over(tmp_path):
    run_record.write_config(tmp_path, Config(), "1 x cpu")
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document["config"]["data"]["virtual_shards"] = 256
    path.write_text(json.dumps(document))
    assert run_record.read_config(tmp_path) == Config()


def test_a_version_that_changed_is_named(tmp_path):
    run_record.write_config(tmp_path, Config(), "1 x cpu")
    assert run_changes.changed_settings(tmp_path, Config()) == []
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document["versions"]["jax"] = "0.0.1"
    path.write_text(json.dumps(document))
    (line,) = run_changes.changed_settings(tmp_path, Config())
    assert line.startswith("version of jax since the last start: 0.0.1 -> ")
    path.write_text(json.dumps(document | {"versions": [], "numeric_settings": 3}))
    damaged = run_changes.changed_settings(tmp_path, Config())
    assert not any("version of" in line for line in damaged), "no traceback either"


@pytest.mark.parametrize(
    ("name", "refused"),
    [
        ("NVIDIA_TF32_OVERRIDE", True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", True),
        ("JAX_RAGGED_DOT_USE_GPU_PALLAS_TRITON_LOWERING", True),
        ("JAX_OPTIMIZATION_LEVEL", True),
        ("NCCL_ALGO", False),
        ("CUBLAS_WORKSPACE_CONFIG", False),
        ("ONEDNN_MAX_CPU_ISA", False),
    ],
)
def test_variables_that_change_numbers_are_recorded_and_compared(
    tmp_path, monkeypatch, name, refused
):
    monkeypatch.delenv(name, raising=False)
    without = run_record.program(Config())
    run_record.write_config(tmp_path, Config(), "1 x cpu")
    monkeypatch.setenv(name, "0")
    now = run_record.program(Config())
    assert [key for key in now if now[key] != without[key]] == ["settings of JAX and XLA"]
    line = f"{name} was not set when this run began, and is 0"
    if refused:
        with pytest.raises(ConfigError, match=f"{line}; it changes results"):
            run_changes.changed_settings(tmp_path, Config())
    else:
        assert run_changes.changed_settings(tmp_path, Config()) == [line]
    run_record.write_config(tmp_path, Config(), "1 x cpu")
    assert run_changes.changed_settings(tmp_path, Config()) == []


def test_code_that_changed_is_named(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("class Own: ...\n")
    own = f"{file}:Own"
    config = dataclasses.replace(
        Config(loss=LossConfig(target=own)), model=ModelConfig(family=Extension(target=own))
    )
    run_record.write_config(tmp_path, config, "1 x cpu", trains_embeddings=False)
    assert run_changes.changed_settings(tmp_path, config) == []
    before = run_record.program(config)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    assert document["code"].keys() == {"jaxvlm", "config.loss.target", "config.model.family.target"}
    document["code"]["jaxvlm"] = "0"
    path.write_text(json.dumps(document))
    (line,) = run_changes.changed_settings(tmp_path, config)
    assert line.startswith("code of jaxvlm since the last start: 0 -> ")
    file.write_text("class Own:\n    weight = 2\n")
    assert run_record.program(config) != before, "other processes' files are compared"
    lines = run_changes.changed_settings(tmp_path, config)
    assert [line.split(" since ")[0] for line in lines] == [
        "code of config.loss.target",
        "code of config.model.family.target",
        "code of jaxvlm",
    ]
    document["code"] = []  # damaged, or of a version that wrote none
    path.write_text(json.dumps(document))
    assert run_changes.changed_settings(tmp_path, config) == []


def test_a_source_that_a_resumed_run_does_not_read_again_is_said(tmp_path):
    run_record.write_config(tmp_path, Config(), "1 x cpu")
    changed = Config(init_from="other", optim=OptimConfig(learning_rate=1.0))
    note = "; it is not read: the run goes on from its own checkpoint"
    before = run_changes.changed_settings(tmp_path, changed)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    after = run_changes.changed_settings(tmp_path, changed)
    assert len(before) == len(after) == 2 and not any(note in line for line in before)
    assert [line.endswith(note) for line in after] == ["init_from" in line for line in after]
    adapted = dataclasses.replace(Config().model.lora, checkpoint="peft")
    changed = Config(model=dataclasses.replace(Config().model, lora=adapted))
    (line,) = run_changes.changed_settings(tmp_path, changed)
    assert line.endswith(note)
