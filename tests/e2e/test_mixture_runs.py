"""Runs on a mixture: metrics count by source, and what is refused before a file is read."""

import json
import os
import shutil

import jax
import loopback_store
import numpy as np
import pytest

import jaxvlm
from jaxvlm.checkpoint.run_changes import read_config_to_use
from jaxvlm.cli import main
from jaxvlm.config import ConfigError, from_config_dict
from tests.runs import HERE, recipe, write_data

STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two sources of images of their own."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, images in (("shapes", 12), ("signs", 8)):
        (folder / name).mkdir()
        write_data(folder / name, images)
    return folder


def mixed(folder):
    config = recipe(folder / "shapes" / "data.jsonl")
    config.data.train = ""
    config.data.eval = ""
    config.data.batch_size = 2
    config.data.mixture = {
        "shapes": {"train": str(folder / "shapes/data.jsonl"), "weight": 2.0},
        "signs": {"train": str(folder / "signs/data.jsonl"), "weight": 1},
    }
    config.steps, config.epochs, config.log_every = STEPS, 0.0, 1
    return config


def test_metrics_count_by_source(folder, tmp_path):
    jaxvlm.Trainer(mixed(folder), tmp_path / "run", jax.devices()[:1]).fit()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "train/loss" in row]
    assert len(rows) == STEPS
    for row in rows:
        counts = [row[f"train/mixture/{name}/sequences"] for name in ("shapes", "signs")]
        assert sum(counts) == 2 * row["step"]
        assert abs(counts[0] - 2 * row["step"] * 2 / 3) <= 2
    assert rows[-1]["train/mixture/signs/passes"] > rows[0]["train/mixture/signs/passes"]


@pytest.mark.parametrize(
    "mixture, more, says",
    [
        ({}, {"data.train": "x.jsonl"}, "both name training data"),
        ({"a": {"train": "x", "epochs": 2.0}}, {"steps": 3}, "mixture.a.epochs says how much"),
        ({"a": {"train": "x", "wieght": 1.0}}, {}, "a.wieght is not a setting; did you mean"),
        ({"a": {"train": "x", "weight": -1.0}}, {}, r"config\.data\.mixture\.a\.weight=-1"),
        ({"a": "x.jsonl"}, {}, r"mixture\.a is a group of settings, not 'x.jsonl'"),
        ({}, {"data.mixture_temperature": 2.0}, "mixture_temperature=2.0 is not read without"),
        ({"a": {"train": "x.jsonl", "image_root": "/no"}}, {}, r"mixture\.a\.image_root='/no'"),
        (
            {"a": {"train": "easy-vqa:train", "ignored_fields": ("x",)}},
            {},
            r"mixture\.a\.ignored_fields=\('x',\) is not read",
        ),
        ({}, {"data.mixture_temperature": 0.0}, "mixture_temperature=0.0: must be at least 0.1"),
        ({"a": {"train": "x", "epochs": 1e9}}, {}, "epochs=1000000000.0: must be from 0 to"),
        ({}, {"loss.name": "info_nce"}, "mixture is not read by config.loss.name='info_nce'"),
    ],
)
def test_what_a_run_refuses(folder, mixture, more, says):
    config = mixed(folder)
    config.update_from_flattened_dict(more)
    if mixture:
        config.data.mixture = mixture
    with pytest.raises(ConfigError, match=says):
        jaxvlm.Trainer(config, devices=jax.devices()[:1])


def test_a_runs_record_names_its_sources_from_any_folder(folder, tmp_path, monkeypatch):
    config = mixed(folder)
    config.data.mixture = {"signs": {"train": "signs/data.jsonl"}}
    document = {
        "config": json.loads(json.dumps(from_config_dict(config), default=vars)),
        "folder": str(folder),
    }
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    found = read_config_to_use(workdir).data.mixture["signs"]
    assert os.path.samefile(found.train, folder / "signs/data.jsonl")


def write_recipe(folder, signs="data"):
    """A recipe whose argument is the folder of the sources."""
    file = folder / "mixture_recipe.py"
    file.write_text(
        "import importlib.util, pathlib\n"
        f"spec = importlib.util.spec_from_file_location('r', {str(HERE / 'recipe.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "def get_config(arg):\n"
        "    config = module.get_config('')\n"
        "    config.data.train, config.data.eval, config.data.batch_size = '', '', 2\n"
        "    config.data.mixture = {\n"
        "        'shapes': {'train': arg + '/shapes/data.jsonl', 'weight': 2},\n"
        f"        'signs': {{'train': arg + '/signs/{signs}.jsonl', 'weight': 1}}}}\n"
        "    return config\n"
    )
    return file


def test_data_check_reads_each_source(folder, tmp_path, capsys):
    with open(folder / "signs" / "bad.jsonl", "w") as out:
        out.write((folder / "signs" / "data.jsonl").read_text() + '{"id": "odd"}\n')
    file = write_recipe(tmp_path, "bad")
    assert main.run(["data", "check", f"--config={file}:{folder}"]) == 1
    said = capsys.readouterr().out
    assert "shapes: " in said and "24 of 24 records are good" in said
    assert "16 of 17 records are good" in said and "neither 'conversations'" in said
    assert "mixture: shapes: " in said and "% of the sequences" in said
    many = ["data", "check", f"--config={file}:{folder}", "--config.data.batch_size=64"]
    (folder / "signs" / "bad.jsonl").write_text((folder / "signs" / "data.jsonl").read_text())
    assert main.run(many) == 1
    assert "config.data.mixture.shapes: 24 records make" in capsys.readouterr().out
    weighed = [f"--config.data.mixture.{name}.weight=0.5" for name in ("shapes", "signs")]
    assert main.run([*many[:3], *weighed]) == 0
    assert "% of the sequences" in capsys.readouterr().out
    own = str(folder / "shapes" / "data.jsonl")
    for source in (own, str(tmp_path / "new.jsonl")):  # one of the mixture's, and another one
        (tmp_path / "new.jsonl").write_text('{"question": "hi", "answer": "yes"}')
        assert main.run(["data", "check", source, many[2]]) == 0


def trained(config, workdir, steps=STEPS):
    config.steps, config.checkpoint.every = steps, 2
    trainer = jaxvlm.Trainer(config, workdir, jax.devices()[:1])
    trainer.fit()
    return [np.asarray(x) for x in jax.tree.leaves(trainer.state.params)]


def test_a_mixture_is_packed_source_by_source(folder, tmp_path, monkeypatch, capsys):
    """The bits of a run on the files, from the folders and from a web server; and it goes on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sets, recipe_of = tmp_path / "sets", f"--config={write_recipe(tmp_path)}:{folder}"
    assert main.run(["data", "pack", recipe_of, f"--output={sets}"]) == 0
    said = capsys.readouterr().out
    for name, count in (("shapes", 24), ("signs", 16)):
        assert f"{sets}/{name}: {count} records" in said
        assert f"--config.data.mixture.{name}.train={sets}/{name}\n" in said
        assert main.run(["data", "verify", f"{sets}/{name}"]) == 0
    shutil.rmtree(sets / "signs")  # as of a pack that was killed
    assert main.run(["data", "pack", recipe_of, f"--output={sets}"]) == 2
    said, first = capsys.readouterr().err, f"--config.data.mixture.shapes.train={sets}/shapes"
    assert f"{sets}/shapes is packed already: to pack the others, add {first}" in said
    assert main.run(["data", "pack", recipe_of, f"--output={sets}", first]) == 0
    said = capsys.readouterr().out
    assert all(f"mixture.{x}.train={sets}/{x}\n" in said for x in ("shapes", "signs"))
    packed_flags = [f"--config.data.mixture.{n}.train={sets}/{n}" for n in ("shapes", "signs")]
    assert main.run(["data", "check", recipe_of, packed_flags[0]]) == 0
    said = capsys.readouterr().out
    assert f"shapes: {sets}/shapes: 24 records, packed" in said
    assert "signs: " in said and "16 of 16 records are good" in said
    assert "mixture: signs: 33.3 % of the sequences" in said
    again = ["data", "pack", recipe_of, f"--output={tmp_path / 'more'}", *packed_flags]
    assert main.run(again) == 2 and "mixture is packed already" in capsys.readouterr().err

    wanted = trained(mixed(folder), tmp_path / "files")
    trained(mixed(folder), tmp_path / "run", 3)
    with loopback_store.store(sets, loopback_store.Web) as store:
        places = [("run", sets, sets), ("both", folder / "shapes/data.jsonl", f"{store.url}")]
        for workdir, shapes, signs in places:
            config = mixed(folder)
            if shapes == sets:
                config.data.mixture.shapes.train = f"{sets}/shapes"
            config.data.mixture.signs.train = f"{signs}/signs"
            for ours, theirs in zip(trained(config, tmp_path / workdir), wanted, strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "more, says",
    [
        ({"max_records": 3}, r"mixture\.a\.max_records=3 is not read by .*set, which is packed"),
        ({"ignored_fields": ("x",)}, r"mixture\.a\.ignored_fields=.* which is packed"),
    ],
)
def test_settings_of_reading_are_not_for_packed_sources(folder, tmp_path, more, says):
    set_ = tmp_path / "set"
    set_.mkdir()
    (set_ / "packed.json").write_text("{}")
    config = mixed(folder)
    config.data.mixture = {"a": {"train": str(set_), **more}}
    with pytest.raises(ConfigError, match=says):
        jaxvlm.Trainer(config, devices=jax.devices()[:1])


def test_settings_of_reading_without_a_file(folder, tmp_path):
    set_ = tmp_path / "set"
    set_.mkdir()
    (set_ / "packed.json").write_text("{}")
    config = mixed(folder)
    config.data.mixture = {"a": {"train": str(set_)}}
    config.data.ignored_fields = ("x",)
    with pytest.raises(ConfigError, match=r"data\.ignored_fields=.* by a mixture of packed sets"):
        jaxvlm.Trainer(config, devices=jax.devices()[:1])
