"""Tile padding compared with buffer assignments of libtpu 0.0.42 (v5p)."""

from __future__ import annotations

import json
import types

import pytest

from benchmarks import planner
from benchmarks.common import RESULTS
from jaxvlm.planner.memory import step_memory, tpu_padding
from jaxvlm.planner.request import abstract_devices
from jaxvlm.train import program_memory

SIZES = [
    ((), 4, 512),
    ((28,), 4, 512),
    ((1152,), 4, 8192),
    ((4096,), 4, 16384),
    ((2, 2), 4, 1024),
    ((2, 2, 3), 4, 2048),
    ((2, 3, 1024), 4, 24576),
    ((3, 4096), 4, 65536),
    ((28, 2048), 4, 262144),
    ((49155, 512), 4, 100679680),
    ((512, 49155), 4, 100679680),
    ((24, 256, 16, 64), 4, 25165824),
    ((24, 16, 16, 64), 4, 3145728),
    ((27, 16, 72), 4, 221184),
    ((27, 288, 16, 72), 4, 47775744),
    ((27, 288, 4304), 4, 135364608),
    ((14, 14, 3, 288), 4, 1032192),
    ((2, 2048, 1536), 1, 6291456),
    ((2, 6, 384, 384, 3), 1, 5308416),
    ((27, 12, 729, 1152), 2, 549421056),
    ((27, 288, 16, 72), 2, 23887872),
]


@pytest.mark.parametrize(("shape", "itemsize", "theirs"), SIZES)
def test_padded_sizes_match_the_compiler(shape, itemsize, theirs):
    assert tpu_padding.size(shape, itemsize) == theirs


def test_heads_before_a_kernel_take_twice_their_bytes():
    heads = (6, 2, 16, 2048, 64)
    assert (
        tpu_padding.size(heads, 2, as_written=True) == 100663296 == 2 * tpu_padding.size(heads, 2)
    )


GATHERED = [
    ((32, 4096, 32, 128), 1, True),  # LLaVA-1.5-7B
    ((32, 11008, 4096), 2, True),
    ((4096, 32064), 0, True),
    ((26, 2304, 4, 256), 1, True),  # PaliGemma 2
    ((26, 2304, 9216), 1, True),
    ((26, 9216, 2304), 2, False),
    ((26, 8, 256, 2304), 3, False),
    ((257216, 2304), 1, False),
    ((36, 16, 128, 2048), 3, True),  # Qwen2.5-VL-3B
    ((32, 1280, 16, 80), 1, False),
    ((32, 1280, 3420), 1, False),
    ((32, 3420, 1280), 2, False),
]


@pytest.mark.parametrize(("shape", "dim", "keeps"), GATHERED)
def test_parameters_that_keep_their_layout_are_those_that_the_compiler_copies_at_the_start(
    shape, dim, keeps
):
    assert tpu_padding.keeps_layout(shape, dim, 8) == keeps


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "model", "strategy", "rows", "length", "theirs"),
    [
        ("v5p:2x2x2", "llava-1.5-7b", "zero2", 1, 2048, 32.61 + 30.94),  # all gathered at once
        ("v5p:2x2x2", "paligemma2-3b", "zero1", 1, 1024, 13.74 + 6.65),  # some transposed
        ("v5e:2x4", "paligemma2-3b", "hybrid_shard", 2, 1024, 7.76 + 5.36),  # a table by rows
    ],
)
def test_updates_on_tpus_need_what_the_compiler_gives_them(
    target, model, strategy, rows, length, theirs
):
    """GiB of the buffer assignments; the vision encoder is frozen."""
    point = planner.Point(target, model, strategy, "full", rows, length, "decoder")
    found = step_memory.estimate(planner.setup_of(point, abstract_devices.devices("tpu", 8)))
    assert found.peak / 2**30 == pytest.approx(theirs, rel=0.05)


def test_an_empty_array_takes_no_bytes():
    assert tpu_padding.size((0, 128), 4) == 0


@pytest.mark.long
def test_a_tpu_s_states_and_peak_match_the_compiler():
    """smolvlm-2.2b, a frozen vision encoder, on eight v5e; the figures are in this file."""
    point = planner.Point("v5e:2x4", "smolvlm-2.2b", "fsdp", "full", 2, 2048, "decoder")
    setup = planner.setup_of(point, abstract_devices.devices("tpu", 8))
    found = step_memory.estimate(setup)
    arguments, heap = 3027725824, 2279146496
    assert 0 <= arguments - sum(found.states.values()) < 4096  # counters
    assert found.peak == pytest.approx(arguments + heap, rel=0.02)


def test_a_tpu_program_s_peak_is_not_the_sum_of_what_the_compiler_counts():
    """smolvlm-2.2b on eight v5p: the buffer assignment gives it 6,903,803,392 + 4,268,933,312."""
    counted = types.SimpleNamespace(
        argument_size_in_bytes=6903803392, output_size_in_bytes=6898465760,
        alias_size_in_bytes=6898461184, temp_size_in_bytes=5690206464,
        host_argument_size_in_bytes=0, host_temp_size_in_bytes=0,
        peak_memory_in_bytes=10939610592,
    )  # fmt: skip
    place = types.SimpleNamespace(device_set={abstract_devices.Device(0, "tpu")})
    program = types.SimpleNamespace(memory_analysis=lambda: counted, input_shardings=[place])
    found = program_memory.memory(program)["peak"]
    assert found == counted.peak_memory_in_bytes
    assert found == pytest.approx(6903803392 + 4268933312, rel=0.025)
    place.device_set = {abstract_devices.Device(0, "gpu")}
    assert program_memory.memory(program)["peak"] == 6903803392 + 4576 + 5690206464


def test_a_buffer_assignment_is_read():
    text = (
        "allocation 0: size 512, constant:\n"
        "allocation 1: size 4096, parameter 0, shape |f32[8,128]|, maybe-live-out:\n"
        " value: <1 p @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}\n"
        "allocation 2: size 65536, color 1, preallocated-temp:\n"
        "allocation 3: size 8192, preallocated-temp:\n"
    )
    sizes = {"arguments": 4096, "temporary": 8192, "peak": 12288}
    assert planner.read_assignment(text)["compiled"] == sizes


def test_states_on_tpus_are_the_compilers_to_the_counters():
    result = json.loads((RESULTS / "planner_memory.json").read_text())
    assert planner.compared(result["rows"]) == result["summary"]
    done = [r for r in result["rows"] if r.get("from") == "buffer assignment"]
    assert len(done) >= 12
    for row in done[::7]:
        states = planner.predicted(planner.Point(*row["point"]))["states"]
        assert 0 <= row["compiled"]["arguments"] - states < 8192, row["point"]
