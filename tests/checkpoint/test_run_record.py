"""What is said of a ``config.json`` that is none."""

import json

import pytest

from jaxvlm.checkpoint import run_record
from jaxvlm.config import Config, ConfigError
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


def test_a_version_that_changed_is_named(tmp_path):
    run_record.write_config(tmp_path, Config(), "1 x cpu")
    assert run_record.changed_settings(tmp_path, Config()) == []
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    document["versions"]["jax"] = "0.0.1"
    path.write_text(json.dumps(document))
    (line,) = run_record.changed_settings(tmp_path, Config())
    assert line.startswith("version of jax since the last start: 0.0.1 -> ")
    path.write_text(json.dumps(document | {"versions": [], "numeric_settings": 3}))
    damaged = run_record.changed_settings(tmp_path, Config())
    assert not any("version of" in line for line in damaged), "no traceback either"
