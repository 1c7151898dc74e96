"""The command ``jaxvlm federate``: a federation from start to figures, and what it refuses."""

import json
import pathlib

import pytest
from runs import HERE, refused, write_data

from jaxvlm.cli import federate
from jaxvlm.cli.main import run

RECIPE = HERE / "recipe.py"
SETTINGS = {"federate.sites": 2, "federate.rounds": 2, "outer.steps": 2, "steps": 4}


@pytest.fixture
def flags(tmp_path):
    data = write_data(tmp_path)
    overrides = [f"--config.{name}={value}" for name, value in SETTINGS.items()]
    return [f"--config={RECIPE}:{data}", f"--workdir={tmp_path / 'run'}", *overrides]


def said(capsys, *args):
    """Exit code of ``args``, and what they said on stderr."""
    code = run(list(args))
    return code, capsys.readouterr().err


def test_simulate_and_status(flags, tmp_path, capsys):
    assert run(["federate", "simulate", "--json", "--alpha=1", *flags]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    for name in ("site-0", "site-1"):
        assert f"{name}: starts from version 0" in out
        assert f"{name}: train 4/4" in err and f"{name}: compiled the step" in err
    assert all(line.startswith("site-") for line in err.splitlines())
    assert result["version"] == 2 and result["virtual_seconds"] == pytest.approx(4, abs=1e-3)
    plot = tmp_path / "plot.png"
    assert run(["federate", "status", str(tmp_path / "run"), "--json", f"--plot={plot}"]) == 0
    out = capsys.readouterr().out
    assert "version 2 of 2" in out and plot.stat().st_size > 1000
    for path, why in (("p.txt", "ends with .png, .svg, .pdf"), ("none/p.png", "no folder")):
        args = ("status", str(tmp_path / "run"), f"--plot={tmp_path / path}")
        assert why in refused(lambda *a: said(capsys, "federate", *a), *args)
    found = json.loads(out.splitlines()[-1])
    assert [site["site"] for site in found["sites"]] == ["site-0", "site-1"]
    assert all(site["bytes_sent"] > 0 for site in found["sites"])
    assert run(["federate", "simulate", "--alpha=1", *flags]) == 0  # nothing is left to do
    code, line = said(capsys, "federate", "simulate", *flags)  # without --alpha: other data
    assert code == 2 and "sites have begun" in line and "--alpha was '1' and is 'inf'" in line
    more = ["--alpha=1", "--config.federate.rounds=3", "--config.steps=6"]
    code, line = said(capsys, "federate", "simulate", *flags, *more)
    assert code == 2 and "a federation of 2 rounds" in line
    assert f"--config.init_from={tmp_path / 'run' / 'site-0'}" in line
    code, line = said(capsys, "eval", f"--checkpoint={tmp_path / 'run'}")
    assert code == 2 and "holds no run" in line and "in its folders site-0, site-1" in line


@pytest.mark.parametrize("verb", federate.VERBS)
def test_a_verbs_help_is_of_its_own_flags(verb, capsys):
    assert run(["federate", verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = {line.strip().removeprefix("--") for line in lines if line.startswith("  --")}
    assert shown == {"json", *federate.VERBS[verb]}
    assert lines[0].startswith(f"usage: jaxvlm federate {verb} ") and "|" not in lines[0]


def test_the_help_of_all_verbs(capsys):
    assert run(["federate", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  --{flag}\n" in out for names in federate.VERBS.values() for flag in names)


def test_what_is_refused(flags, tmp_path, capsys):
    def line(*args):
        return refused(lambda *a: said(capsys, "federate", *a), *args)

    assert "usage: jaxvlm federate simulate" in line()
    assert "usage: jaxvlm federate simulate" in line("serv")
    assert "needs --config=FILE and --workdir=DIR" in line("simulate", flags[0])
    assert "must be above 0" in line("simulate", "--alpha=0", *flags)
    assert "--alpha divides data.train" in line("simulate", "--alpha=1", "--site_data=a,b", *flags)
    assert "1 files of data for config.federate.sites=2" in line(
        "simulate", "--site_data=a.jsonl", *flags
    )
    assert "'x': give numbers above 0" in line("simulate", "--step_seconds=1,x", *flags)
    assert "3 step times for 2 sites" in line("simulate", "--step_seconds=1,2,3", *flags)
    assert "takes no --plot" in line("simulate", "--plot=a.png", *flags)
    assert "no federation that has begun" in line("status", str(tmp_path))
    assert "`jaxvlm federate` trains it" in refused(lambda *a: said(capsys, "train", *a), *flags)
    none = [f for f in flags if not f.startswith("--config.federate")]
    assert "sites=0: set the number of sites" in line("simulate", *none)


def test_a_damaged_folder_is_named(flags, tmp_path, capsys):
    assert run(["federate", "simulate", *flags]) == 0
    table = pathlib.Path(tmp_path / "run" / "coordinator" / "table.json")
    table.write_text(table.read_text()[:50])
    code, line = said(capsys, "federate", "status", str(tmp_path / "run"))
    assert code == 2 and "is damaged" in line
