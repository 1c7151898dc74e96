"""What a simulation refuses, before any site has joined and before it writes to others' folders."""

import pytest
from runs import recipe

from jaxvlm.config import ConfigError
from jaxvlm.data.errors import DataError
from jaxvlm.sites.simulate import Simulation
from jaxvlm.sites.turns import Turns


def federation(data):
    config = recipe(data)
    config.checkpoint.every = 0
    config.federate.sites, config.federate.rounds, config.outer.steps = 2, 2, 2
    config.steps = 4
    return config


def test_settings_are_refused_before_anything_is_written(data, tmp_path):
    config = federation(data)
    config.data.eval, config.eval_every = str(data), 3
    with pytest.raises(ConfigError, match=r"eval_every=3 is no multiple .* set it to 4"):
        Simulation(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [2, 10])
def test_a_site_with_too_few_records_is_named(data, tmp_path, count):
    """Two questions about each image: ten records are five pieces."""
    few = tmp_path / "few.jsonl"
    lines = data.read_text().replace('"image": "', f'"image": "{data.parent}/').splitlines(True)
    few.write_text("".join(lines[:count]))
    simulation = Simulation(federation(data), tmp_path / "run", data=[str(data), str(few)])
    with pytest.raises(DataError) as error:
        simulation.run()
    said = str(error.value)
    assert f"site-1: data: {count} records make {count // 2} packed pieces" in said
    assert "data.batch_size=8, which all simulated sites share" in said
    assert f"lower it to {count // 2} or less" in said and "more records" in said
    assert "share_images" not in said and "alpha" not in said
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"data"}


def test_no_site_joins_where_one_can_not_start(data, tmp_path):
    """The second one's folder is refused when it is opened, after both were built."""
    site = tmp_path / "run" / "site-1"
    site.mkdir(parents=True)
    (site / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    lines = []
    simulation = Simulation(federation(data), tmp_path / "run", log=lines.append)
    with pytest.raises(ConfigError, match=r"site-1: .* is a symbolic link"):
        simulation.run()
    assert not (tmp_path / "run" / "coordinator" / "federation.json").exists()
    assert not any("joined" in line for line in lines)


@pytest.mark.parametrize(
    "name, says", [("config.json", "a training run"), ("federation.json", "a coordinator of")]
)
def test_a_folder_of_something_else(data, tmp_path, name, says):
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"holds {says}.*new folder"):
        Simulation(federation(data), tmp_path).run()
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_meeting_takes_no_time_that_shows():
    turns = Turns(["a"])
    turns.meet("a")
    assert turns.latest == pytest.approx(0, abs=1e-3)
