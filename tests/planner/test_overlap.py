"""Asynchronous collectives, read from the text of a program."""

from __future__ import annotations

from jaxvlm.planner.compiled import overlap

GROUPS = "replica_groups={{0,1}}"
PROGRAM = f"""HloModule step, is_scheduled=true

%matmul (a: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8] parameter(0)
  ROOT %dot = f32[8,8] dot(%a, %a), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%body (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8] parameter(0)
  %start = (f32[4,8], f32[8,8]) all-gather-start(%x), {GROUPS}
  %fusion = f32[8,8] fusion(%x), kind=kOutput, calls=%matmul
  %done = f32[8,8] all-gather-done(%start)
  %start.1 = (f32[4,8], f32[8,8]) all-gather-start(%x), {GROUPS}
  %done.1 = f32[8,8] all-gather-done(%start.1)
  ROOT %late = f32[8,8] fusion(%x), kind=kOutput, calls=%matmul
}}

%condition (x: f32[8,8]) -> pred[] {{
  ROOT %true = pred[] constant(true)
}}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  %sum = f32[8,8] all-reduce(%p), {GROUPS}, to_apply=%add
  %wait = f32[8,8] all-reduce-start(%p), {GROUPS}, backend_config={{"is_sync":true}}
  %loop = f32[8,8] while(%sum), condition=%condition, body=%body, known_trip_count={{"n":"3"}}
}}
"""


def test_pairs_are_counted_as_often_as_they_run_and_hidden_behind_a_matmul():
    found = overlap.pairs(PROGRAM)
    assert found == overlap.Pairs(asynchronous=6, hidden=3, synchronous=2, kinds={"all-gather": 6})
