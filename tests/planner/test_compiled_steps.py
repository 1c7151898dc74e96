"""The table of compiled steps meets its bars; costs are read from a program's text."""

from __future__ import annotations

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import compiled_steps, executed_flops, hlo_costs, lowering
from benchmarks.common import RESULTS
from jaxvlm.hf import model_zoo
from jaxvlm.nn.kernels import flash_gpu
from jaxvlm.nn.kernels.flash import SHARED
from jaxvlm.nn.mask import of_segments

MOST = {"none": 1.15, "dots": 1.15, "full": 1.45}
"""Executed over useful FLOPs, by remat."""
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "attention.md"


@pytest.fixture(scope="module")
def result():
    return json.loads((RESULTS / f"{compiled_steps.NAME}.json").read_text())


def test_the_tables_are_whole_and_of_these_kernels(result):
    """Where this fails, run ``python -m benchmarks.compiled_steps`` and commit its result."""
    assert result["digest"] == lowering.digest()
    assert result["models"] == lowering.digests(compiled_steps.MODELS)
    for table in ("attention", "steps", "jobs"):
        assert set(result[table]) == {name for t, name, _ in compiled_steps.work() if t == table}
    assert compiled_steps.tables(result) in PAGE.read_text(encoding="utf-8")


def test_a_mask_costs_attention_little(result):
    for name, row in result["attention"].items():
        masked, unmasked = row["masked"], row["unmasked"]
        for figure in ("temporary", "moved"):
            assert masked[figure] <= 1.5 * unmasked[figure], (name, figure)
        backward = sum(n for call, n in masked["calls"].items() if "backward" in call)
        assert 1 <= backward <= 2, name


def test_no_compiled_step_has_scores_or_a_dense_mask(result):
    for name, row in result["steps"].items():
        assert "why" not in row and not row["squares"], name
        calls = " ".join(row["calls"])
        assert "flash_forward" in calls and "flash_backward" in calls, name
        assert "ScaleBias" not in calls, name


def test_little_work_is_useless(result):
    for name, row in result["jobs"].items():
        assert 1 <= row["ratio"] <= MOST[name.split(", ")[2]], name


PROGRAM = """HloModule step, is_scheduled=true

%inside (a: f32[5,64,32], i: s32[], x: bf16[16,64]) -> bf16[16,32] {
  %a = f32[5,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = bf16[16,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %cast = bf16[5,64,32]{2,1,0} convert(%a)
  %cut = bf16[1,64,32]{2,1,0} dynamic-slice(%cast, %i, %zero, %zero), dynamic_slice_sizes={1,64,32}
  %w = bf16[64,32]{1,0} bitcast(%cut)
  ROOT %dot.1 = bf16[16,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], bf16[16,64], f32[5,64,32])) -> (s32[], bf16[16,64], f32[5,64,32]) {
  %state = (s32[], bf16[16,64]{1,0}, f32[5,64,32]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state), index=0
  %x.1 = bf16[16,64]{1,0} get-tuple-element(%state), index=1
  %a.1 = f32[5,64,32]{2,1,0} get-tuple-element(%state), index=2
  %y = bf16[16,32]{1,0} fusion(%a.1, %i.1, %x.1), kind=kLoop, calls=%inside
  ROOT %out = (s32[], bf16[16,64]{1,0}, f32[5,64,32]{2,1,0}) tuple(%i.1, %x.1, %a.1)
}

%condition (state.1: (s32[], bf16[16,64], f32[5,64,32])) -> pred[] {
  %state.1 = (s32[], bf16[16,64]{1,0}, f32[5,64,32]{2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (p: (s32[], bf16[16,64], f32[5,64,32]), q: bf16[2,3,8,4], u: f32[1,64,32]) -> f32[] {
  %p = (s32[], bf16[16,64]{1,0}, f32[5,64,32]{2,1,0}) parameter(0)
  %q = bf16[2,3,8,4]{3,2,1,0:T(8,128)S(1)} parameter(1)
  %u = f32[1,64,32]{2,1,0} parameter(2)
  %n = s32[] constant(0)
  %loop = (s32[], bf16[16,64]{1,0}, f32[5,64,32]{2,1,0}) while(%p), \
condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %all = f32[5,64,32]{2,1,0} get-tuple-element(%loop), index=2
  %put = f32[5,64,32]{2,1,0} dynamic-update-slice(%all, %u, %n, %n, %n)
  %o = (bf16[2,3,8,4]{3,2,1,0:T(8,128)}, f32[2,8]{1,0}) custom-call(%q), \
custom_call_target="tpu_custom_call", \
metadata={op_name="jit(step)/transpose(jvp(flash_backward))/pallas_call"}
  %w.2 = bf16[64,32]{1,0} bitcast(%u)
  %x.2 = bf16[16,64]{1,0} get-tuple-element(%loop), index=1
  %g = (bf16[16,32]{1,0}, s8[4096]{0}) custom-call(%x.2, %w.2), \
custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{ \
"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %c = bf16[16,32]{1,0} convolution(%x.2, %w.2), dim_labels=bf_io->bf
  %room = f32[5,64,32]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %r = f32[] constant(0)
}
"""


def test_costs_are_read_from_a_program():
    ops = {op.name: op for op in hlo_costs.read(PROGRAM)}
    product = 2 * 16 * 64 * 32
    assert (ops["fusion"].times, ops["fusion"].flops) == (5, product)
    sliced, x, y = 64 * 32 * 4, 16 * 64 * 2, 16 * 32 * 2  # bytes
    assert ops["fusion"].moved == sliced + x + y + 4  # and the loop's counter
    assert ops["dynamic-update-slice"].moved == 2 * 64 * 32 * 4 + 3 * 4
    kernel = ops["flash_backward"]
    assert kernel.operands == ((2, 3, 8, 4),)
    assert kernel.moved == 2 * 3 * 8 * 4 * 2 + 2 * 8 * 4  # the operand is in fast memory
    assert "AllocateBuffer" not in ops, "nothing is written"
    assert ops["__cublas$gemm"].flops == ops["convolution"].flops == product
    assert hlo_costs.custom_calls(list(ops.values())) == {"__cublas$gemm": 1, "flash_backward": 1}


def test_a_batch_of_matmuls_may_be_a_convolution():
    """Of 7 x 7 pairs of matrices along the padded window, those of equal index meet."""
    rest = "window={size=7 stride=6 lhs_dilate=7}, dim_labels=0bf_0io->0bf"
    flops = hlo_costs._of_convolution((7, 16, 64), (7, 64, 32), (7, 16, 32), rest)
    assert flops == 7 * 2 * 16 * 64 * 32


def test_tiles_are_those_that_the_mask_meets():
    row, length = executed_flops.typical_row(model_zoo.config_of("qwen3-vl-2b")), 4096
    spans = row.masks[length]
    dense = np.asarray(spans.dense(length))[0]
    for kernel in ("flash_forward", "flash_backward_keys"):
        block = flash_gpu.sizes_for(128, jnp.bfloat16, SHARED).forward
        pair = (block.own, block.other)
        tiles = met(dense, *(pair[::-1] if kernel == "flash_backward_keys" else pair))
        assert executed_flops.gpu_area(kernel, spans, 128, SHARED) == tiles
    assert executed_flops.tpu_area(spans, length) == met(dense, 256, 256)


def met(dense, query, key):
    """Area of the tiles in which any query attends to any key."""
    shape = dense.shape[0] // query, query, dense.shape[1] // key, key
    return dense.reshape(shape).any((1, 3)).sum() * query * key


def test_rows_without_waste_execute_what_is_useful():
    """A row of one conversation whose mask is a multiple of the tiles."""
    spans = of_segments(1024, False, jnp.repeat(jnp.arange(1, 5), 256)[None])
    assert executed_flops.gpu_area("flash_forward", spans, 128, SHARED) == 4 * 256**2
    assert executed_flops.tpu_area(of_segments(2048, False), 2048) == 2048**2
