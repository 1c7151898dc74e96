"""Options of an extension: nested ones, and the types that a field may have."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any, Literal, Optional

import pytest

from jaxvlm.cli import main
from jaxvlm.config import ConfigError, Extension, LossConfig
from jaxvlm.config.extension import make


@dataclasses.dataclass(frozen=True)
class Sub:
    a: int = 1
    b: float = 2.0


@dataclasses.dataclass(frozen=True)
class Own:
    kind: Literal["a", "b", 3] = "a"
    most: Optional[int] = None  # noqa: UP045  # users write it so
    least: float | None = None
    sub: Sub = Sub()
    names: list = dataclasses.field(default_factory=list)
    numbers: list[int] = dataclasses.field(default_factory=list)
    table: dict[str, int] = dataclasses.field(default_factory=dict)
    what: Any = None
    of: type = int
    sizes: tuple[int, ...] = ()

    def __call__(self, file):
        return []


def made(**options):
    return make(Extension(target=f"{__file__}:Own", options=options), "config.own")


def test_values_are_checked():
    own = made(kind="b", most=2, least=3.0, sub={"a": 4}, sizes=[5, 6])
    assert (own.kind, own.most, own.least, own.sizes) == ("b", 2, 3.0, (5, 6))
    assert (own.sub.a, own.sub.b) == (4, 2.0)
    assert made(kind=3).kind == 3 and made(most=None).most is None


@pytest.mark.parametrize(
    "options, says",
    [
        ({"kind": "c"}, "config.own.options.kind='c'; known: 'a', 'b', 3"),
        ({"kind": 3.0}, "config.own.options.kind=3.0; known: 'a', 'b', 3"),
        ({"kind": ["a"]}, r"config.own.options.kind=('a',); known"),
        ({"names": ["x"]}, "a field of type list can't be set; give it the type"),
        ({"numbers": [1]}, "(tuple[float, ...] instead of a list)"),
        ({"table": {"x": 1}}, "a frozen dataclass instead of a dict"),
        ({"what": 1}, "config.own.options.what: a field of type"),
        ({"of": 1}, "config.own.options.of: a field of type"),
        ({"most": "x"}, "config.own.options.most must be"),
        ({"sub": {"c": 1}}, "config.own.options.sub.c is not a setting"),
        ({"sizes": ["x"]}, "config.own.options.sizes[0] must be int"),
    ],
)
def test_what_can_t_be_set_is_named(options, says):
    with pytest.raises(ConfigError) as error:
        made(**options)
    assert says in str(error.value)


@pytest.mark.parametrize("group", ["loss", "data.format", "model.family", "cache.custom_policy"])
@pytest.mark.parametrize("returns", ["default_config()", "Config()"])
def test_nested_options_of_every_extension_are_set(tmp_path, capsys, group, returns):
    (tmp_path / "run.py").write_text(
        "from jaxvlm.config import Config, default_config\n"
        f"def get_config():\n    return {returns}\n"
    )
    path = f"--config.{group}.options.sub"
    args = [f"--config={tmp_path}/run.py", f"{path}.a=2", f"{path}.deep.b=x", f"{path}.c=(1,2)"]
    assert main.run(["train", *args, "--print_config", "--json"]) == 0
    values = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in group.split("."):
        values = values[name]
    assert values["options"] == {"sub": {"a": 2, "deep": {"b": "x"}, "c": [1, 2]}}


def test_no_other_group_takes_new_names(tmp_path, capsys):
    (tmp_path / "run.py").write_text("from jaxvlm.config import default_config as get_config\n")
    args = [f"--config={tmp_path}/run.py", "--config.optim.options.a=2"]
    assert main.run(["train", *args, "--print_config"]) == 2
    assert "'options'" in capsys.readouterr().err


def test_what_a_run_recorded_of_its_loss_is_no_setting():
    loss = LossConfig(target="x:Y").recorded(True)
    assert loss == LossConfig(target="x:Y") and loss.trains_embeddings is True
    assert typing.get_type_hints(LossConfig).keys() == {"target", "options", "name"}
