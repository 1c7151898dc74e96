"""The figures of federations in the docs are those of the benchmark's result."""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = json.loads((ROOT / "benchmarks/results/federation_cpu.json").read_text())["rows"]
PAGE = " ".join((ROOT / "docs/federated.md").read_text().split())
CLAIMS = " ".join((ROOT / "docs/claims.md").read_text().split())


def percent(run, seed=0, field="exact_match"):
    [row] = [row for row in ROWS if (row["run"], row["seed"]) == (run, seed)]
    return f"{100 * row[field]:.1f} %"


def test_sites_by_how_the_data_are_divided():
    for sites in (2, 4, 8):
        alphas = ("inf", "0.3", "0.1")
        cells = " | ".join(percent(f"{sites} sites, Dirichlet({alpha})") for alpha in alphas)
        assert f"| {sites} sites | {cells} |" in PAGE
    seeds = [percent("4 sites, Dirichlet(0.3)", seed).removesuffix(" %") for seed in range(3)]
    assert f"have {seeds[0]}, {seeds[1]} and {seeds[2]} %" in PAGE


def test_cached_tokens():
    hits = "mean_hit_rate_of_site_0"
    for how in ("flush", "lazy", "digest"):
        run = f"2 sites, trained encoder, {how}"
        assert f"| `{how}` | {percent(run)} | {percent(run, field=hits)} |" in PAGE
        assert percent(run) in CLAIMS and f"({percent(run, field=hits)}" in CLAIMS
    none = percent("2 sites, trained encoder, no cache")
    assert f"| no cache | {none} | |" in PAGE and f"{none} without a cache" in CLAIMS


def of(run, seed=0):
    [row] = [row for row in ROWS if (row["run"], row["seed"]) == (run, seed)]
    return row


def test_a_slow_site():
    whole = of("4 sites, one 4 x slower, synchronous")
    parts = of("4 sites, one 4 x slower, buffer of 2")
    assert whole["exact_match"] == of("4 sites, Dirichlet(0.3)")["exact_match"]
    assert f"for the same weights, {percent(whole['run'])}" in PAGE
    assert f"({sum(parts['accepted'])}; the slow site's are {parts['accepted'][0]} of them)" in PAGE
    seconds = [f"{row['virtual_seconds']:,.0f}" for row in (parts, whole)]
    assert f"after {seconds[0]} steps' time instead of {seconds[1]}" in PAGE
    assert f"lags up to {parts['largest_lag']}, and learn less: {percent(parts['run'])}" in PAGE


def test_bits_and_adapters():
    sizes = []
    for dtype, said in {"bfloat16": "bfloat16", "int8": "int8", "int4": "int4"}.items():
        row = of(f"4 sites, updates in {dtype}")
        sizes.append(f"{percent(row['run'])} in {said} ({row['megabytes_sent']:.0f} MB)")
    whole = of("4 sites, Dirichlet(0.3)")
    sent = f"({whole['megabytes_sent']:.0f} MB sent by the sites)"
    assert f"{percent(whole['run'])} in float32 {sent}, {', '.join(sizes)}" in PAGE
    for how in ("product", "freeze_a"):
        row = of(f"4 sites, adapters alone, {how}")
        assert f"{percent(row['run'])} with `" in PAGE
        assert f"({row['megabytes_sent']:.0f} MB" in PAGE
    lost = of("4 sites, adapters alone, product")["lora_lost"]
    assert f"{100 * lost:.1f} % of the mean's norm" in PAGE


def test_noise():
    for noise, said in (("0", "without noise"), ("0.1", "with a noise multiplier of 0.1")):
        assert f"{percent(f'4 sites, noise {noise}')} {said}" in PAGE
    assert f"nothing ({percent('4 sites, noise 1')}) with 1" in PAGE
    epsilons = [
        row["epsilon"] for row in ROWS if re.fullmatch("4 sites, noise (0.1|1)", row["run"])
    ]
    assert [f"{x:,.0f}" for x in epsilons] == ["2,202", "47"]
    assert "epsilon 2,202" in PAGE and "epsilon 47" in PAGE
