"""Settings that a recipe leaves to the planner, resolved for the run's own devices."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from runs import recipe, write_data

from jaxvlm.checkpoint import run_record
from jaxvlm.cli import train
from jaxvlm.config import ConfigError, from_config_dict
from jaxvlm.parallel.strategies import resolve
from jaxvlm.trainer import auto_parallel
from jaxvlm.trainer.trainer import Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    data = write_data(tmp_path_factory.mktemp("data"), images=8)
    return from_config_dict(recipe(data))


def _auto(config, *names):
    values = recipe(config.data.train)
    for name in names:
        with values.unlocked():
            values.update_from_flattened_dict({name: 0 if name == "microbatches" else "auto"})
    return from_config_dict(values)


def test_what_is_left_to_the_planner_is_resolved_and_logged(config, rates):
    lines: list[str] = []
    asked = _auto(config, "strategy.name", "model.decoder.remat", "model.vision.remat")
    made = auto_parallel.resolve_auto(asked, jax.devices(), lines.append)
    assert not auto_parallel.auto_settings(made) and made.microbatches == 1
    mesh, strategy = resolve(made.strategy, made.mesh, jax.devices())
    assert mesh == made.mesh and strategy.name in lines[0]
    assert lines[0].startswith("planner (strategy.name, model.vision.remat, model.decoder.remat): ")
    assert auto_parallel.resolve_auto(made, jax.devices(), lines.append) is made and len(lines) == 1


def test_what_the_recipe_says_stays(config, rates):
    asked = _auto(config, "model.vision.remat", "microbatches")
    decoder = dataclasses.replace(asked.model.decoder, remat="dots")
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, decoder=decoder))
    made = auto_parallel.resolve_auto(asked, jax.devices()[:2], lambda line: None)
    assert made.model.decoder.remat == "dots" and made.model.vision.remat != "auto"
    assert made.microbatches in (1, 2, 4) and made.mesh == asked.mesh


@pytest.mark.parametrize("name", ["strategy.name", "mesh.data"])
def test_islands_stay_and_the_rest_is_chosen(config, rates, name):
    asked = _auto(config, name) if name == "strategy.name" else config
    sizes = dataclasses.replace(asked.mesh, island=2, data=0 if name == "mesh.data" else -1)
    made = auto_parallel.resolve_auto(
        dataclasses.replace(asked, mesh=sizes), jax.devices(), lambda line: None
    )
    mesh, _ = resolve(made.strategy, made.mesh, jax.devices())
    assert mesh.island == 2 and mesh == made.mesh


@pytest.mark.parametrize("remat", ["offload", "full"])
def test_what_no_list_of_the_planner_has_may_be_set(config, rates, remat):
    data = dataclasses.replace(config.data, batch_size=24)
    asked = dataclasses.replace(_auto(config, "model.vision.remat"), data=data, microbatches=3)
    decoder = dataclasses.replace(asked.model.decoder, remat=remat)
    asked = dataclasses.replace(asked, model=dataclasses.replace(asked.model, decoder=decoder))
    made = auto_parallel.resolve_auto(asked, jax.devices(), lambda line: None)
    assert made.microbatches == 3 and made.model.decoder.remat == remat
    assert made.model.vision.remat in ("none", "dots", "full")
    odd = dataclasses.replace(asked, microbatches=5)
    with pytest.raises(ConfigError, match="no candidate: 24 rows, microbatches=5 and 8 devices"):
        auto_parallel.resolve_auto(odd, jax.devices(), lambda line: None)


def test_a_run_refuses_what_it_would_not_take(config, rates):
    def none(made):
        raise ConfigError(f"never {made.strategy.name}")

    with pytest.raises(ConfigError, match="'auto': the planner has no candidate: never "):
        auto_parallel.resolve_auto(_auto(config, "strategy.name"), jax.devices(), print, none)


def test_rates_that_are_not_known_choose_nothing(config, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="jaxvlm plan --calibrate once, or set it"):
        auto_parallel.resolve_auto(_auto(config, "microbatches"), jax.devices(), print)


def test_a_mistake_of_the_planner_is_one_line(config, rates, monkeypatch):
    def broken(*_):
        raise OverflowError("too large\nby far")

    for module, name in ((auto_parallel.search, "search"), (auto_parallel, "machine_of")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, broken)
            with pytest.raises(ConfigError, match=r"=0: .*\(OverflowError: too large\); set"):
                auto_parallel.resolve_auto(_auto(config, "microbatches"), jax.devices(), print)


def test_a_resumed_run_keeps_what_was_chosen(config, rates, tmp_path):
    asked = _auto(config, "strategy.name", "model.decoder.remat")
    mesh, strategy = resolve(dataclasses.replace(asked.strategy, name="zero1"), asked.mesh,
                             jax.devices())  # fmt: skip
    decoder = dataclasses.replace(asked.model.decoder, remat="dots")
    model = dataclasses.replace(asked.model, decoder=decoder)
    began = dataclasses.replace(asked, mesh=mesh, strategy=strategy, model=model)
    run_record.write_config(tmp_path, began, f"8 x {jax.devices()[0].device_kind}")
    lines: list[str] = []
    made = auto_parallel.resolve_auto(asked, jax.devices(), lines.append, workdir=tmp_path)
    assert made == began and "as this run began" in lines[0]

    changed = dataclasses.replace(asked, data=dataclasses.replace(asked.data, batch_size=16))
    for new, devices in ((changed, jax.devices()), (asked, jax.devices()[:4])):
        lines.clear()
        auto_parallel.resolve_auto(new, devices, lines.append, workdir=tmp_path)
        assert "as this run began" not in lines[0]


def test_a_command_line_may_be_overruled_by_the_planner_alone(config):
    overrides = {"model.decoder.remat": "auto"}
    train._check_overrides(overrides, config, ["model.decoder.remat"])
    with pytest.raises(ConfigError, match=r"decoder\.remat='auto', but"):
        train._check_overrides(overrides, config, ["model.vision.remat"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"mesh": {"data": 8}}, "chooses config.mesh too"),
        (
            {"encoder": {"devices": 2}},
            "a disaggregated vision encoder .config.encoder.devices=2. can't be",
        ),
        (
            {"strategy": {"param_gather_dtype": "int8"}},
            "chooses config.strategy.param_gather_dtype too",
        ),
    ],
)
def test_what_the_planner_does_not_know_is_refused(config, change, says):
    asked = _auto(config, "strategy.name")
    for name, value in change.items():
        if isinstance(value, dict):
            value = dataclasses.replace(getattr(asked, name), **value)
        asked = dataclasses.replace(asked, **{name: value})
    with pytest.raises(ConfigError, match=f"config.strategy.name='auto'.*{says}"):
        auto_parallel.resolve_auto(asked, jax.devices(), lambda line: None)


@pytest.mark.long
def test_a_run_with_the_planners_choice_trains(config, rates, tmp_path, capsys):
    asked = _auto(config, "strategy.name", "model.decoder.remat", "model.vision.remat")
    made = Trainer(dataclasses.replace(asked, steps=4), tmp_path / "run").fit()
    assert made["step"] == 4
    plan = made["plan"]
    assert plan["compiled_bytes"] > 0 and plan["measured_seconds"] > 0
    # So small a model is counted by formula (docs/planning.md); tests/planner has real sizes.
    assert 0.5 < plan["planned_bytes"] / plan["compiled_bytes"] < 2
    said = capsys.readouterr()
    assert "planner (" in said.out and "planned and real: " in said.err
