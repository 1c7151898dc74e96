"""Long tests that .ci/run has no minutes for: run by ``-m exhaustive``, before a release.

Most show again, for another case, what the others show. Kills of Flower's own coordinator and
nodes, runs of 300 steps with quantised communication, and the accelerator benchmark's parts are
here for their length alone. They are told by their file and the beginning of their names.
"""

from __future__ import annotations

from typing import Any

import pytest

TESTS = {
    "benchmarks/test_accelerator_script.py": (
        "test_each_part_has_figures_or_a_reason", "test_each_strategy_has_figures",
    ),
    "cache/test_cache_memory.py": (
        "test_half_of_the_pages_and_all_again_change_no_bit[fsdp8-bfloat16",
        "test_half_of_the_pages_and_all_again_change_no_bit[data8-float32",
    ),
    "cache/test_encode.py": (
        "test_all_found_runs_no_encoder_and_sends_no_features[data8-llava-somewhere",
        *(
            f"test_a_cache_that_may_not_be_seen_changes_no_bit[{case}"
            for case in (
                "data4_tensor2-float32-qwen-", "data4_tensor2-bfloat16-deep-",
                "data8-float32-deep-", "data8-float32-frozen_qwen-", "data8-bfloat16-qwen-",
                "data4_tensor2-float32-frozen-", "fsdp8-bfloat16-deep-", "data8-float32-llava-",
            )
        ),
        "test_the_order_in_which_tokens_are_kept_changes_no_bit[data4_tensor2-",
        "test_the_order_in_which_tokens_are_kept_changes_no_bit[fsdp8-fine-tiled",
        "test_encode_batches_give_the_gradients_of_the_whole[one-",
    ),
    "cache/test_frozen_blocks.py": tuple(
        f"test_gradients_are_those_of_the_whole_tower[{case}"
        for case in (
            "frozen_qwen-one-", "frozen_deep-one-", "frozen-fsdp8-", "frozen_staged-data4_stage2-]",
        )
    ),
    "cache/test_policy.py": ("test_gradients_by_draw_are_right_in_the_mean",),
    "cache/test_pair_tokens.py": (
        "test_tokens_that_are_given_change_no_bit[vlm-data4-bfloat16-",
        "test_tokens_that_are_given_change_no_bit[dual, any size-",
    ),
    "checkpoint/test_checkpoint.py": tuple(
        f"test_damage_is_reported_and_the_previous_checkpoint_is_used[{how}"
        for how in (
            "pipe_for_largest", "device_for_record", "truncate_largest", "deep_record",
            "dangling_link_for_largest", "delete_record",
        )
    ),
    "checkpoint/test_object_store.py": (
        *(f"test_no_kill_of_many_loses_anything[{draw}" for draw in (1, 3)),
        *(
            f"test_an_answer_that_is_wrong_once_is_no_damage[{case}-gs]"
            for case in (
                "record-unavailable", "record-flipped", "record-<lambda>0", "record-<lambda>1",
                "state-unavailable", "state-short", "state-<lambda>0",
            )
        ),
        "test_a_kill_while_one_is_written_or_deleted_loses_nothing[gs",
        "test_what_is_damaged_for_good_is_kept_aside[gs",
        "test_a_store_that_does_not_answer_is_no_damage[gs",
    ),
    "e2e/test_cache_memory_runs.py": ("test_an_evaluation_has_the_memory[True",),
    "e2e/test_elastic_runs.py": (
        "test_a_run_goes_on_with_those_that_are_left[32",
        "test_a_run_goes_on_with_those_that_are_left[12-2",
    ),
    "e2e/test_encoder_processes.py": (
        "test_several_processes_give_ones_losses[4",
        "test_several_processes_give_ones_losses[2-True",
    ),
    "e2e/test_federated_runs.py": (
        "test_recipes_run[lora",
        *(f"test_a_killed_site_goes_on_to_the_same_bits[{case}" for case in ("4-", "5-", "8-")),
        "test_a_sites_mesh_is_its_own[axes1",
        "test_adapters_alone_are_sent[product",
        "test_a_trained_encoders_tokens_grow_older_with_outer_updates[lazy",
    ),
    "e2e/test_frozen_dtype_runs.py": (
        "test_a_dual_encoders_frozen_tower_is_held_as_it_came",
        "test_frozen_blocks_are_cut_anew_with_their_bits",
    ),
    "e2e/test_host_cache_runs.py": ("test_gone_on_with_other_settings",),
    "e2e/test_pair_store.py": ("test_memory_alone",),
    "e2e/test_launchers.py": tuple(
        f"test_each_launchers_processes_train_to_one_processs_losses[{launcher}"
        for launcher in ("SLURM", "Open", "SkyPilot", "Vertex", "xpk", "JobSet", "MPICH", "TPU")
    ),
    "e2e/test_object_store_runs.py": (
        "test_a_stopped_run_in_an_object_store_goes_on_to_the_same_bits[gs",
    ),
    "e2e/test_resume.py": ("test_resume_onto_another_mesh[shape2-",),
    "e2e/test_sentence_folders.py": ("test_towers[siglip2", "test_a_vision_language_model[last-"),
    "e2e/test_settings_follow.py": tuple(
        f"test_settings_drawn_at_random[{case}]"
        for case in ("text-1", "text-3", "text-4", "vlm-3", "vlm-4")
    ),
    "e2e/test_two_processes.py": ("test_two_processes_give_one_processs_losses[an island",),
    "federate/test_flower_kills.py": ("test_kills_change_no_bit",),
    "inference/test_kv_generate.py": (
        *(
            f"test_meshes_keep_the_places_of_one_device[{method}-{mesh}"
            for method, meshes in (
                ("vl_cache", ("data8", "fsdp8", "tensor]", "context", "all", "pipeline]")),
                ("vl_cache", ("pipeline and data",)),
                ("snapkv", ("data8", "tensor", "context", "pipeline")),
                ("random", ("data8", "fsdp8", "tensor", "context]", "all", "pipeline")),
            )
            for mesh in meshes
        ),
        *(
            f"test_what_is_stored_always_fits[{share}-"
            for share in ("0.01", "0.3", "0.99996")
        ),
        "test_neighbours_order_and_padding_change_nothing[random",
        "test_neighbours_order_and_padding_change_nothing[window",
    ),
    "inference/test_shared_prefixes.py": (
        "test_they_answer_as_each_alone[data-none", "test_they_answer_as_each_alone[pipeline-none",
    ),
    "inference/test_visual_tokens.py": (
        "test_answers_are_those_without_a_cache_and_nothing_is_encoded_twice[data",
    ),
    "kills/test_kills.py": ("test_killed_five_times_and_the_same_bits[evaluations",),
    "parallel/test_distributed.py": (
        "test_a_stopped_process_is_named[1",
        "test_killing_one_ends_the_other[0-uneven", "test_killing_one_ends_the_other[1-loop",
        "test_a_peer_that_never_starts_is_named[which1",
        "test_ctrl_c_in_one_ends_the_other_in_one_line[0",
    ),
    "parallel/test_grad_reduce.py": ("test_a_run_of_300_steps_ends_where_the_other_does",),
    "parallel/test_layered_reduction.py": tuple(
        f"test_gradients_are_off_by_half_a_step_of_each_part[{case}"
        for case in ("qwen3-mesh2-", "qwen3-mesh4-", "llava-mesh1-")
    ),
    "parallel/test_pipeline.py": (
        "test_memory_is_flat_in_microbatches_with_1f1b_and_grows_with_gpipe",
        "test_stages_in_turn_give_one_devices_output[qwen3",
    ),
    "parallel/test_quantized_gather.py": ("test_a_run_of_300_steps_ends_where_the_other_does",),
    "planner/test_claims.py": (
        "test_a_claim_computes_to_its_stored_figures[DDP with gradient caching",
    ),
    "planner/test_search.py": (
        "test_quick_memory_of_experts_is_close_to_the_trace[h100:64-1-1",
    ),
    "spmd/test_transfer.py": tuple(
        f"test_every_part_comes_from_its_own_process[{case}"
        for case in ("trained-4-data", "frozen-4-data", "frozen-2-data]")
    ),
    "spmd/test_disaggregated.py": tuple(
        f"test_a_trained_disaggregated_encoder_equals_one_device[{case}]"
        for case in ("moe-2", "qwen3-0", "qwen3-2", "llava-1", "llava-3")
    ),
    "spmd/test_pair_stages.py": ("test_stages_give_one_devices_gradient[full-info_nce-mesh0-",),
    "train/test_dropout_keys.py": (
        "test_a_mini_batch_that_is_run_again_drops_the_same[vlm, stages",
        "test_a_mini_batch_that_is_run_again_drops_the_same[dual, uneven",
    ),
    "train/test_frozen_dtypes.py": (
        *(
            f"test_outputs_have_the_same_bits[{case}"
            for case in ("float32-qwen3", "float32-gemma3", "float32-llava", "bfloat16-gemma3")
        ),
        "test_bfloat16_gives_the_bits_of_float32_and_is_not_cast[vlm, frozen encoder",
    ),
    "train/test_gradcache.py": (
        "test_any_mesh_gives_one_devices_gradient[vlm, tower frozen-",
        "test_any_mesh_gives_one_devices_gradient[locked-",
        "test_any_mesh_gives_one_devices_gradient[vlm-data2_context2_tensor2-",
        "test_any_mini_batch_does[mini_batches0]",
        "test_a_mini_batch_at_a_time_gives_the_whole_batchs_gradient[vlm, tower frozen",
    ),
    "train/test_islands.py": (
        "test_islands_are_diloco[fsdp x pipeline", "test_islands_are_diloco[tensor]",
        "test_islands_are_diloco[data x tensor", "test_fragments_are_streaming_diloco[in turn]",
    ),
}  # fmt: skip
"""File -> how the names of its tests begin."""


def mark(items: list[Any]) -> None:
    """Mark the collected tests that are named above as exhaustive."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        if name.startswith(TESTS.get(file.removeprefix("tests/"), ("\0",))):
            item.add_marker(pytest.mark.exhaustive)
