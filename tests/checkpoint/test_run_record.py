"""What is said of a ``config.json`` that is none."""

import pytest

from jaxvlm.checkpoint import run_record
from jaxvlm.config import ConfigError
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
