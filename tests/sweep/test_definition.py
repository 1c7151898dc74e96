"""What a sweep is asked to run: grids, files, ids of trials."""

from __future__ import annotations

import decimal
import itertools
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxvlm.cli.sweep import _resolve
from jaxvlm.config import ConfigError
from jaxvlm.models import vlm
from jaxvlm.sweep import definition, sweep, trial
from jaxvlm.sweep.definition import Row

ROOT = pathlib.Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("(),('vision/*',)", ["()", "('vision/*',)"]),
        ("(('vision/*',0.1),),()", ["(('vision/*',0.1),)", "()"]),
        ("'a,b',c", ["a,b", "c"]),
        ("a'b,c", ["a'b", "c"]),
        ("('a),b',), x", ["('a),b',)", "x"]),
        ("part[0-9,a].jsonl", ["part[0-9,a].jsonl"]),
    ],
)
def test_commas_inside_of_values_divide_nothing(text, values):
    assert definition.split_values(text) == values


@given(st.lists(st.text("ab.*/-_1", min_size=1), min_size=1, max_size=4))
def test_values_are_split_as_they_were_joined(values):
    assert definition.split_values(",".join(values)) == values
    tuples = [repr(tuple(values[:n])) for n in range(len(values))]
    assert definition.split_values(",".join([*tuples, *values])) == [*tuples, *values]


def test_grids_make_all_combinations():
    rows = definition.read_rows(["config.seed=0,1", "optim.learning_rate=1e-4,3e-4"])
    assert [tuple(row.overrides.values()) for row in rows] == list(
        itertools.product(["0", "1"], ["1e-4", "3e-4"])
    )
    assert list(rows[0].overrides) == ["seed", "optim.learning_rate"]


def test_files_are_crossed_with_grids(tmp_path):
    file = tmp_path / "trials.jsonl"
    file.write_text('{"optim.frozen": ["vision/*"], "data.flip": true}\n\n{"epochs": 1e-2}\n')
    rows = definition.read_rows(["seed=0,1"], trials=str(file))
    first = {"optim.frozen": "('vision/*',)", "data.flip": "true"}
    assert rows == [
        Row("", first | {"seed": "0"}),
        Row("", first | {"seed": "1"}),
        Row("", {"epochs": "0.01", "seed": "0"}),
        Row("", {"epochs": "0.01", "seed": "1"}),
    ]
    file.write_text('{"one": {"data.flip": false}, "two": {"data.resize": "squash"}}')
    rows = definition.read_rows(["seed=0,1"], ablation=str(file))
    assert [row.factor for row in rows] == ["base", "base", "one", "one", "two", "two"]
    assert [row.overrides for row in rows][::2] == [
        {"seed": "0"},
        {"data.flip": "false", "seed": "0"},
        {"data.resize": "squash", "seed": "0"},
    ]


@pytest.mark.parametrize(
    ("grids", "trials", "ablation", "says"),
    [
        ([], "", "", "a sweep varies settings"),
        (["seed="], "", "", "a value is missing"),
        (["seed=1,,2"], "", "", "a value is missing"),
        (["optim.frozen=('a',"], "", "", r"\) is missing"),
        (["seed"], "", "", "give PATH=V,V"),
        (["optim.x[0]=1"], "", "", "is no path of a setting"),
        (["seed=0", "config.seed=1"], "", "", "seed is given twice"),
        (["seed=0"], '{"seed": 1}', "", "seed is in --grid and in"),
        ([], "", '{"a": {"seed": 1}}\n{}', "is not JSON"),
        ([], '{"seed": null}', "", "null is no value"),
        ([], '{"optim": {"seed": 1}}', "", "one by one"),
        ([], "[1]", "", "trials:1: give an object"),
        ([], "\n", "", "lists no trials"),
        ([], "", "{}", "give factors by name"),
        ([], "", '{"base": {"seed": 1}}', "rename the factor"),
        ([], "", '{"a": {}}', "changes nothing"),
        ([], '{"seed": 1, "config.seed": 2}', "", "seed is given twice"),
        ([], "{}", "{}", "give one of them"),
    ],
)
def test_what_can_not_be_a_sweep_is_refused(tmp_path, grids, trials, ablation, says):
    files = []
    for name, text in (("trials", trials), ("ablation", ablation)):
        (tmp_path / name).write_text(text)
        files.append(str(tmp_path / name) if text else "")
    with pytest.raises(ConfigError, match=says):
        definition.read_rows(grids, *files)


def ids(rows: list[Row]) -> list[str]:
    asked = sweep.resolved(pathlib.Path("s"), sweep.Definition(QUICKSTART, {}, rows), _resolve)
    return [made.id for made in asked.trials]


floats = st.floats(1e-8, 1e8).map(lambda x: float(f"{x:.6g}"))
VALUES = {
    "optim.learning_rate": floats,
    "optim.warmup_steps": st.integers(0, 1000).map(float),  # a field of int or float
    "seed": st.integers(0, 2**40),
    "data.flip": st.booleans(),
    "optim.frozen": st.lists(st.sampled_from(["vision/*", "decoder/*"]), unique=True).map(tuple),
    "checkpoint.metric": st.text("abc_", min_size=1),
}
settings_of = st.fixed_dictionaries({}, optional=VALUES).filter(bool)


@st.composite
def written(draw, values):
    """A row of settings in some order, with each value in one of the ways to write it."""
    overrides = {}
    for path in draw(st.permutations(list(values))):
        value = values[path]
        ways = [definition.as_text(value)]
        if isinstance(value, float):
            exact = decimal.Decimal(repr(value))
            ways += [f"{exact:f}", f"{exact:e}", f"{exact:E}", f"{exact}"]
            ways += [str(int(value))] * value.is_integer()
        elif isinstance(value, tuple):
            ways += [str(list(value)).replace("[", "(").replace("]", ",)" if value else ")")]
        elif isinstance(value, bool):
            ways += [str(value), str(int(value))]
        overrides[path] = draw(st.sampled_from(ways))
    return Row("", overrides)


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_an_id_is_of_the_values_however_they_are_written(data):
    one, two = data.draw(settings_of), data.draw(settings_of)
    again = [ids([data.draw(written(values))])[0] for values in (one, one, two)]
    assert again[0] == again[1]
    assert (again[1] == again[2]) == (one == two)


def test_an_id_stays_what_it_is():
    """Folders of sweeps are found again by later versions."""
    assert ids([Row("", {"optim.learning_rate": "1e-3", "seed": "1"})]) == ["ee22dcde87"]
    with pytest.raises(ConfigError, match=r"asked for twice: \w+ \(optim.learning_rate=0.001\)"):
        ids([Row("", {"optim.learning_rate": text}) for text in ("1e-3", "0.001")])


def test_the_ablation_of_relevance_is_of_the_quickstart():
    file = str(ROOT / "configs" / "ablations" / "relevance.json")
    rows = definition.read_rows(["seed=0,1"], ablation=file)
    assert (
        len(set(ids(rows)))
        == len(rows)
        == 2 * (1 + len(json.loads(pathlib.Path(file).read_text())))
    )
    tokens = {}
    for row in rows:
        config = _resolve(f"{QUICKSTART}:smoke", row.overrides)
        tokens[row.factor] = vlm.num_visual_tokens(config.model)
        assert config.data.share_images != config.model.connector.relevance.query or (
            not config.model.connector.relevance.budget
        )
    assert {name for name, number in tokens.items() if number != 16} == {"relevance, 28 tokens"}


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / trial.RECORD).write_text('{"values": 1}')
    with pytest.raises(ConfigError, match=r"trial.json is damaged.*train it again"):
        trial.read_record(tmp_path)
    (tmp_path / sweep.FILE).write_text("[]")
    with pytest.raises(ConfigError, match=r"sweep.json is damaged"):
        sweep.read_definition(tmp_path)
