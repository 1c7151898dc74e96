"""Collectives are found in HLO text, whichever way their groups are written."""

from __future__ import annotations

import pytest

from jaxvlm.plan.collectives import Collective, read, total

MESH = {"data": 2, "fsdp": 4}
HLO = """HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {{
  ROOT %sum = f32[] add(%x, %y)
}}

%body (carry: (s32[], f32[8,16], /*index=2*/bf16[64])) -> (s32[], f32[8,16]) {{
  %carry = (s32[], f32[8,16]{{1,0}}) parameter(0)
  %whole = f32[32,16]{{1,0:T(8,128)}} all-gather(f32[8,16]{{1,0}} %x), channel_id=1, {gather}, dimensions={{0}}
  ROOT %out = (s32[], f32[8,16]{{1,0}}) tuple(%i, %x)
}}

%condition (carry: (s32[], f32[8,16])) -> pred[] {{
  %bound = s32[]{{:T(128)}} constant(5)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}}

%all-reduce-scatter (param: f32[64]) -> f32[16] {{
  %all-reduce.1 = f32[64]{{0}} all-reduce(f32[64]{{0}} %param), channel_id=3, {gather}, to_apply=%add
  ROOT %own = f32[16]{{0}} dynamic-slice(%all-reduce.1, %at), dynamic_slice_sizes={{16}}
}}

ENTRY %main (p: f32[8,16]) -> f32[8,16] {{
  %loop = (s32[], f32[8,16]{{1,0}}) while(%start), condition=%condition, body=%body{trips}
  %sum.1 = (bf16[100]{{0}}, f32[10]{{0}}) all-reduce(bf16[100]{{0}} %a, f32[10]{{0}} %b), channel_id=2, {reduce}, to_apply=%add
  %fused = f32[16]{{0}} fusion(%c), kind=kCustom, calls=%all-reduce-scatter
  %sent = s8[40]{{0}} collective-permute(s8[40]{{0}} %q), channel_id=4, source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,0}},{{4,5}},{{5,6}},{{6,7}},{{7,4}}}}
  %begun = (f32[8]{{0}}, f32[32]{{0}}) all-gather-start(f32[8]{{0}} %r), channel_id=5, {gather}, dimensions={{0}}
  ROOT %ended = f32[32]{{0}} all-gather-done(%begun)
}}
"""  # noqa: E501
LISTED = {
    "gather": "replica_groups={{0,1,2,3},{4,5,6,7}}",
    "reduce": "replica_groups={{0,4},{1,5},{2,6},{3,7}}",
    "trips": "",
}
IOTA = {
    "gather": "replica_groups=[2,4]<=[8]",
    "reduce": "replica_groups=[4,2]<=[2,4]T(1,0)",
    "trips": ', backend_config={"known_trip_count":{"n":"5"}}',
}
NAMED = {
    "gather": "replica_groups=mesh['a'=2,'b'=4] {'b'}",
    "reduce": "replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}",
    "trips": "",
}
PARTS = {
    "gather": "replica_groups=mesh['a'=8] {'a':(2)4}",
    "reduce": "replica_groups=mesh['a'=8] {'a':(1)2}",
    "trips": "",
}


@pytest.mark.parametrize("written", [LISTED, IOTA, NAMED, PARTS])
def test_all_ways_of_writing_are_read(written):
    found = read(HLO.format(**written), MESH)
    assert set(found) == {
        Collective("all-gather", ("fsdp",), "f32", 6, 5 * 3 * 8 * 16 * 4 + 3 * 8 * 4),
        Collective("all-reduce", ("data",), "bf16", 1, 200),
        Collective("all-reduce", ("data",), "f32", 1, 40),
        Collective("reduce-scatter", ("fsdp",), "f32", 1, 3 * 64),
        Collective("collective-permute", ("fsdp",), "s8", 1, 40),
    }
    assert total(found, "data") == 240 and total(found, kind="reduce-scatter") == 192
    assert total(found) == sum(c.wire_bytes for c in found)


def test_a_loop_without_a_count_is_refused():
    text = HLO.format(**LISTED).replace("direction=LT", "direction=NE")
    with pytest.raises(ValueError, match="loop: a loop with collectives and no known trip count"):
        read(text, MESH)
