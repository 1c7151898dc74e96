"""Every setting has help, and docs/settings.md is the page generated from it."""

import inspect
import pathlib
import subprocess
import sys

import pytest

from jaxvlm.config import CacheConfig, describe

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "settings.md"
GROUPS = list(describe.groups())
SETTINGS = [setting for group in GROUPS for setting in group.settings]
VERBS = {
    "Adds", "Applies", "Caps", "Chooses", "Clips", "Divides", "Draws", "Drops", "Encodes",
    "Ends", "Flips", "Frees", "Freezes", "Gates", "Gives", "Groups", "Interleaves", "Learns",
    "Leaves", "Lets", "Limits", "Lists", "Logs", "Makes", "Merges", "Multiplies", "Names",
    "Normalizes", "Packs", "Passes", "Prepends", "Records", "Rounds", "Says", "Scales", "Seeds",
    "Sets", "Shares", "Shifts", "Splits", "Stops", "Stretches", "Treats", "Writes",
}  # fmt: skip
"""What the help of a setting begins with."""
OF_GROUPS = {"Adds", "Caches", "Chooses", "Computes", "Configures", "Describes", "Pools", "Puts"}
OF_GROUPS |= {"Sets", "Stretches"}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.path)
def test_help_begins_with_a_verb_and_ends_in_a_full_stop(group):
    text = " ".join((group.schema.__doc__ or "").split())
    assert text.split(" ")[0] in OF_GROUPS and text.endswith(".")
    docs = describe.attribute_docstrings(group.schema)
    assert list(docs) == list(group.schema.__dataclass_fields__), "each field has a docstring"
    for name, text in docs.items():
        assert text.split(" ")[0] in VERBS, f"{group.path}.{name}: {text}"
        assert text.endswith(".") and len(text) > 20, f"{group.path}.{name}: {text}"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_a_default_is_among_the_allowed_values(setting):
    if setting.allowed:
        values = setting.default if isinstance(setting.default, tuple) else (setting.default,)
        assert set(values) <= set(setting.allowed)
    assert "Allowed" not in setting.help


def test_no_help_stands_in_a_comment():
    for group in GROUPS:
        assert "#" not in inspect.getsource(group.schema)


def test_paths_types_and_defaults():
    by_path = {setting.path: setting for setting in SETTINGS}
    rate = by_path["config.encoder.strategy.error_feedback"]
    assert (rate.type, rate.default) == ("bool", False)
    assert by_path["config.dual.vision.pool"].default == "attention"
    assert by_path["config.cache.policy"].allowed[0] == CacheConfig().policy == "off"
    assert len(by_path) == len(SETTINGS) > 250


def test_the_page_is_up_to_date():
    code = "import sys; sys.modules['jax'] = None; import jaxvlm.config.describe as d; "
    code += "sys.stdout.write(d.page())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    command = "python -m jaxvlm.config.describe > docs/settings.md"
    assert PAGE.read_text(encoding="utf-8") == done.stdout, f"run {command}"
