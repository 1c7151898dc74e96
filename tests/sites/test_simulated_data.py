"""What a simulation makes in ``data/``: kept where it is the same, else replaced or refused."""

import json

import pytest
from runs import recipe

from jaxvlm.config import ConfigError, from_config_dict
from jaxvlm.data.tokenizer import chat_tokenizer
from jaxvlm.sites.simulated_data import SimulatedData

NAMES = ["site-0", "site-1"]


class Made:
    """Starts of one simulation, one after the other."""

    def __init__(self, folder, data):
        self.folder, self.config, self.lines = folder, recipe(data), []

    def start(self, has_begun=False, alpha=float("inf"), files=()):
        self.lines.clear()
        data = SimulatedData(self.folder, has_begun, self.lines.append)
        return data.site_configs(from_config_dict(self.config), NAMES, alpha, files)

    def words(self):
        return chat_tokenizer.read(self.folder / "tokenizer")[0].get_vocab()

    def bytes(self):
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {path: (path.stat().st_ino, path.read_bytes()) for path in files}


@pytest.fixture
def made(tmp_path, data):
    return Made(tmp_path / "data", data)


def copied(data, path, old="", new=""):
    """A file of the same images with other texts."""
    text = data.read_text().replace(old, new) if old else data.read_text()
    path.write_text(text.replace('"image": "', f'"image": "{data.parent}/'))
    return str(path)


def test_the_same_start_keeps_what_was_made(made):
    configs = made.start()
    before = made.bytes()
    assert [config.data.train for config in configs] == [
        str(made.folder / f"{name}.jsonl") for name in NAMES
    ]
    assert made.start(has_begun=True) == made.start() == configs
    tokenizer = made.folder / "tokenizer"
    for path, (inode, content) in made.bytes().items():
        assert content == before[path][1]
        assert inode == before[path][0] or tokenizer not in path.parents
    assert not any("replaced" in line for line in made.lines)


def test_a_failed_attempts_tokenizer_is_replaced(made, data, tmp_path):
    made.start()
    assert "blue" in made.words()
    made.config.data.train = copied(data, tmp_path / "violet.jsonl", "blue", "violet")
    made.start()
    assert "violet" in made.words() and "blue" not in made.words()
    replaced = [line for line in made.lines if "of an earlier start is replaced" in line]
    assert len(replaced) == 2 and "config.data.train was" in replaced[0]
    assert "the tokenizer" in replaced[1] and "texts or images changed" in replaced[1]
    made.config.tokenizer.kind, made.config.tokenizer.vocab_size = "bpe", 280
    made.start()
    assert len(made.words()) <= 280 and "violet" not in made.words()
    assert any("config.tokenizer.kind was 'word' and is 'bpe'" in line for line in made.lines)


def test_what_sites_have_begun_with_is_not_replaced(made, data, tmp_path):
    made.start(alpha=1.0)
    before = made.bytes()
    with pytest.raises(ConfigError, match=r"division .* '1' and is 'inf'.*empty --workdir"):
        made.start(has_begun=True)
    made.config.data.train = copied(data, tmp_path / "violet.jsonl", "blue", "violet")
    with pytest.raises(ConfigError, match=r"sites have begun, and the division of data.train"):
        made.start(has_begun=True, alpha=1.0)
    made.config.data.train = str(data)
    made.config.tokenizer.vocab_size += 1
    with pytest.raises(ConfigError, match=r"tokenizer would be another .config.tokenizer.vocab_s"):
        made.start(has_begun=True, alpha=1.0)
    assert {p: x for p, (_, x) in made.bytes().items()} == {p: x for p, (_, x) in before.items()}


def test_sites_own_files_make_one_tokenizer(made, data, tmp_path):
    files = [str(data), copied(data, tmp_path / "violet.jsonl", "blue", "violet")]
    made.start(files=files)
    assert {"blue", "violet"} <= made.words().keys()
    copied(data, tmp_path / "violet.jsonl", "blue", "purple")
    with pytest.raises(ConfigError, match=r"tokenizer would be another .the texts or images ch"):
        made.start(has_begun=True, files=files)
    made.start(files=files)
    assert "purple" in made.words()


@pytest.mark.parametrize("record", ["", "[1]", '{"the tokenizer": 3}', None])
def test_without_a_record_nothing_is_taken_over(made, record):
    """A kill before the record was written, or damage."""
    made.start()
    (made.folder / "tokenizer" / "tokenizer.json").write_text("{}")
    path = made.folder / "made_of.json"
    path.unlink() if record is None else path.write_text(record)
    with pytest.raises(ConfigError, match=r"no record of it"):
        made.start(has_begun=True)
    made.start()
    assert "blue" in made.words() and json.loads(path.read_text())


def test_data_that_are_missing(made):
    with pytest.raises(ConfigError, match=r"--site_data has an empty name"):
        made.start(files=["a.jsonl", ""])
    made.config.data.train = ""
    with pytest.raises(ConfigError, match=r"--config.data.train=FILE.*--site_data=FILE"):
        made.start()
