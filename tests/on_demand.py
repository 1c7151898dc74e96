"""Which tests are ``long``, besides those that say so, and which of these run on demand alone.

The README's line has twelve minutes. So of whole runs, stores, launchers, sweeps and kills it runs
one or two of each kind, and :data:`LONG` names the others, which ``.ci/run`` runs, too.

:data:`TESTS` are long tests that .ci/run has no minutes for: run by ``-m exhaustive``, before a
release. Most show again, for another case, what the others show. Kills of Flower's own coordinator
and nodes, runs of 300 steps with quantised communication, and the accelerator benchmark's parts are
there for their length alone. All are told by their file and the beginning of their names.
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

LONG = {
    "bad_input/test_bad_input.py": ("test_every_bad_input_is_refused_by_a_line",),
    "cache/test_encode.py": (
        "test_a_cache_that_may_not_be_seen_changes_no_bit",
        "test_all_found_runs_no_encoder_and_sends_no_features",
        "test_no_token_is_older_than_its_bound",
        "test_the_order_in_which_tokens_are_kept_changes_no_bit",
        "test_where_pages_lie_changes_no_bit",
    ),
    "cache/test_pair_tokens.py": ("test_tokens_that_are_given_change_no_bit",),
    "cache/test_policy.py": ("test_need_is_drawn_more_often",),
    "checkpoint/test_checkpoint.py": (
        "test_all_damaged_lists_each",
        "test_damage_is_reported_and_the_previous_checkpoint_is_used",
    ),
    "checkpoint/test_checkpoint_processes.py": ("test_write_stop_damage_and_resume",),
    "checkpoint/test_failing_process.py": (
        "test_folders_that_one_process_makes_late_keep_none_waiting",
        "test_one_that_can_not_write_to_a_shared_disk_keeps_none_waiting",
        "test_one_that_can_not_write_what_it_sends_keeps_none_waiting",
    ),
    "checkpoint/test_object_store.py": (
        "test_a_failure_that_passes_is_waited_for_and_one_that_lasts_is_named[gs",
        "test_a_kill_while_one_is_written_or_deleted_loses_nothing",
        "test_a_run_that_saves_nothing_deletes_nothing",
        "test_a_run_that_was_taken_over_deletes_nothing",
        "test_a_store_that_does_not_answer_has_no_missing_files",
        "test_a_store_that_does_not_answer_is_no_damage[s3",
        "test_an_answer_that_is_wrong_once_is_no_damage",
        "test_the_mark_of_a_checkpoint_goes_before_its_files",
        "test_what_is_damaged_for_good_is_kept_aside",
    ),
    "checkpoint/test_run_folder.py": ("test_what_can_not_be_sent_at_the_end_is_an_error",),
    "checkpoint/test_run_lock.py": (
        "test_a_lock_of_a_lost_machine_is_taken_over_and_its_run_stops",
    ),
    "checkpoint/test_staging.py": ("test_a_full_disk_here_is_no_damage_there",),
    "cli/test_cli.py": (
        "test_a_checkpoint_that_does_not_fit_is_one_line",
        "test_an_answer_with_an_unknown_token_is_never_correct",
        "test_bad_records_are_counted_and_too_many_stop_the_run",
        "test_bad_settings_are_one_line",
    ),
    "cli/test_federate_command.py": (
        "test_a_damaged_folder_is_named",
        "test_simulate_and_status",
    ),
    "data/test_dataset.py": ("test_easy_vqa_epoch",),
    "data/test_fetch.py": ("test_what_fails_for_good_is_named_and_nothing_is_kept",),
    "data/test_mixture.py": ("test_a_source_is_read_as_by_a_run_on_it_alone",),
    "data/test_packed_damage.py": ("test_nothing_damaged_is_trained_on",),
    "data/test_packed_pairs.py": (
        "test_a_damaged_header_is_named",
        "test_nothing_damaged_is_trained_on",
    ),
    "data/test_packed_set.py": ("test_batches_are_those_of_the_files",),
    "data/test_packed_stores.py": (
        "test_a_killed_pack_is_no_set[s3",
        "test_batches_are_those_of_the_files",
        "test_files_that_a_store_has_lost[s3",
        "test_images_come_in_blocks",
        "test_kills_while_files_are_copied",
        "test_what_is_no_set_is_refused",
        "test_what_is_wrong_for_a_while_changes_nothing",
        "test_what_is_wrong_for_good_is_named",
    ),
    "data/test_packing.py": ("test_all_rows_and_seeds_have_the_same_sequences",),
    "data/test_pair_dataset.py": ("test_any_split_of_rows_and_any_start",),
    "data/test_remote_files.py": (
        "test_files_of_the_hub",
        "test_what_is_wrong_for_good_is_no_data",
    ),
    "data/test_remote_images.py": (
        "test_many_are_copied_together[s3",
        "test_what_fails_for_a_while_changes_nothing[s3",
    ),
    "data/test_spool.py": ("test_a_full_disk_is_named_and_nothing_is_left",),
    "data/test_tokenizer.py": (
        "test_a_template_that_raises_loops_or_fills_the_memory_is_an_error",
    ),
    "data/test_videos.py": ("test_the_frames_are_those_that_transformers_samples",),
    "docs/test_design.py": ("test_figures_of_the_quickstart",),
    "e2e/test_any_size.py": (
        "test_images_of_any_size_are_read_from_the_cache",
        "test_questions_about_shared_images_answer_as_each_alone",
        "test_rows_of_any_images_answer_as_each_alone",
    ),
    "e2e/test_cache.py": ("test_frozen_tower",),
    "e2e/test_callbacks.py": (
        "test_a_run_that_fails_has_its_checkpoint",
        "test_the_page_shows_one_that_works",
    ),
    "e2e/test_embedding_runs.py": (
        "test_a_dry_run_shows_pairs",
        "test_a_dual_encoder_from_scratch_is_trained_and_used",
        "test_bad_settings_are_one_line",
    ),
    "e2e/test_encoders.py": ("test_embed_writes_embeddings",),
    "e2e/test_extensions.py": ("test_what_does_not_fit_is_refused_by_name",),
    "e2e/test_federated_runs.py": (
        "test_a_federation_goes_on_from_anothers_weights",
        "test_a_frozen_encoders_tokens_are_encoded_once",
        "test_a_killed_site_goes_on_to_the_same_bits",
        "test_a_site_of_an_ended_federation_begins_no_other",
        "test_a_site_that_lost_a_round_says_so",
        "test_a_sites_mesh_is_its_own",
        "test_a_slow_site_is_not_waited_for",
        "test_a_trained_encoders_tokens_grow_older_with_outer_updates",
        "test_adapters_alone_are_sent",
        "test_an_answer_lost_after_the_update_was_judged",
        "test_noise_has_an_accountant",
        "test_one_site_is_the_plain_run",
        "test_pairs_of_two_sites",
        "test_reset_moments_are_those_of_a_new_run",
        "test_rounded_updates_of_a_killed_site_repeat",
    ),
    "e2e/test_frozen_dtype_runs.py": (
        "test_a_frozen_tower_is_held_and_exported_as_it_came",
        "test_a_run_in_float32_is_converted_if_no_value_changes",
        "test_a_run_is_loaded_as_it_trained",
        "test_a_run_is_resumed_on_another_mesh_with_the_same_bits",
        "test_cached_tokens_of_an_encoder_do_not_depend_on_how_it_is_held",
        "test_stages_train_what_was_frozen_and_freeze_what_was_trained",
    ),
    "e2e/test_island_runs.py": ("test_a_run_that_was_stopped_goes_on_with_the_same_bits",),
    "e2e/test_lora.py": (
        "test_a_run_goes_on_from_an_adapter",
        "test_a_run_trains_adapters_alone_and_resumes",
        "test_a_runs_adapter_is_pefts_and_merges",
        "test_logits_and_gradients_of_an_adapter_are_pefts",
    ),
    "e2e/test_mixture_runs.py": (
        "test_a_mixture_is_packed_source_by_source",
        "test_metrics_count_by_source",
    ),
    "e2e/test_numerics.py": ("test_without_packing_rows_fall_into_buckets",),
    "e2e/test_object_store_runs.py": (
        "test_a_stopped_run_in_an_object_store_goes_on_to_the_same_bits",
        "test_the_command_line_reads_a_run_in_an_object_store",
    ),
    "e2e/test_packed_runs.py": (
        "test_a_run_goes_on_where_its_data_were_packed",
        "test_a_run_on_pairs_goes_on_with_the_packed_set",
        "test_pairs_from_a_web_server",
        "test_the_same_bits_from_a_web_server",
        "test_what_the_loss_does_not_read_is_not_packed",
    ),
    "e2e/test_resume.py": (
        "test_a_missing_evaluation_image_harms_neither_control_nor_grid",
        "test_a_resume_without_evaluation_keeps_the_best_score",
        "test_a_start_that_ended_before_config_json_blocks_nothing",
        "test_another_model_of_the_same_shapes_does_not_go_on",
        "test_changed_data_is_refused",
        "test_early_stop_survives_the_same_command",
        "test_half_written_files_of_a_killed_start_do_no_harm",
    ),
    "e2e/test_settings_follow.py": (
        "test_a_vlms_run",
        "test_flags_that_replace_a_runs_settings_are_named",
    ),
    "e2e/test_token_store.py": (
        "test_a_loaded_model_reads_what_its_run_wrote",
        "test_a_second_run_finds_what_the_first_made",
        "test_a_store_that_can_not_be_written",
        "test_damage_and_part_of_a_store",
        "test_images_that_are_found_are_not_decoded",
        "test_lossy_tokens_in_a_store",
        "test_lossy_tokens_of_a_run_that_is_stopped",
        "test_of_another_tower_nothing_is_found",
        "test_tokens_are_audited",
        "test_trust_of_weights_alone",
    ),
    "e2e/test_two_processes.py": (
        "test_a_killed_process_ends_the_other_with_a_message",
        "test_a_process_that_is_refused_alone_ends_the_other_with_one_line",
    ),
    "e2e/test_video_runs.py": (
        "test_a_run_is_the_same_with_the_cache_and_from_a_packed_set",
        "test_a_videos_frames_are_read_from_the_cache",
    ),
    "evals/test_retrieval.py": ("test_ties_are_in_no_order",),
    "federate/test_flower_relay.py": ("test_no_fault_changes_the_weights",),
    "federate/test_service.py": ("test_killed_at_any_moment_nothing_is_lost",),
    "inference/test_exact_match.py": ("test_exact_match_is_that_of_generated_answers",),
    "inference/test_kv_generate.py": (
        "test_attention_is_that_over_whole_prompts_without_the_evicted",
        "test_meshes_keep_the_places_of_one_device",
        "test_neighbours_order_and_padding_change_nothing",
        "test_what_is_stored_always_fits",
    ),
    "inference/test_shared_prefixes.py": ("test_they_answer_as_each_alone",),
    "inference/test_visual_tokens.py": (
        "test_a_file_is_not_decoded_where_its_tokens_are_on_disk",
        "test_an_image_has_the_bits_that_it_has_alone",
        "test_answers_are_those_without_a_cache_and_nothing_is_encoded_twice",
        "test_other_parameters_have_other_tokens",
    ),
    "launch/test_local.py": (
        "test_each_process_has_its_devices",
        "test_what_ends_mean",
    ),
    "launch/test_slurm.py": (
        "test_a_job_that_is_cancelled_is_not_put_back",
        "test_spare_nodes_are_used_later",
        "test_what_the_processes_ends_mean",
    ),
    "launch/test_targets.py": ("test_a_run_that_does_not_fit_is_not_launched",),
    "losses/test_custom_loss.py": (
        "test_a_run_reserves_the_names_that_it_writes",
        "test_a_run_without_weights_stops",
    ),
    "losses/test_next_token.py": ("test_any_vocabulary_can_be_cut",),
    "losses/test_router.py": ("test_each_microbatch_is_balanced_by_itself[pipeline",),
    "models/test_adapters.py": (
        "test_a_mesh_and_parts_of_a_batch_give_the_same_gradients[mesh0-1",
    ),
    "models/test_decoder.py": ("test_neither_mesh_nor_remat_changes_loss_or_gradients[one-full",),
    "models/test_relevance.py": (
        "test_any_mesh_gives_one_devices_gradients",
        "test_kept_tokens_change_no_bit",
    ),
    "parallel/test_distributed.py": (
        "test_a_peer_that_never_starts_is_named",
        "test_an_error_in_one_ends_both",
        "test_ctrl_c_in_one_ends_the_other_in_one_line",
        "test_exit_now_keeps_its_status",
        "test_killing_one_ends_the_other[1-uneven",
        "test_train_under_mpirun_says_it_in_one_line",
    ),
    "parallel/test_layered_reduction.py": (
        "test_gradients_are_off_by_half_a_step_of_each_part",
        "test_the_wire_carries_bytes",
    ),
    "parallel/test_pipeline.py": ("test_no_matmul_is_done_twice_for_a_smaller_bubble",),
    "planner/test_encoder_placement.py": ("test_rejected_candidates_are_slower_than_the_first",),
    "planner/test_plan_command.py": ("test_the_page_has_the_rate_on_one_device_to_thousands",),
    "planner/test_planned_islands.py": ("test_the_tree_and_other_sizes_have_the_islands",),
    "planner/test_planned_memory.py": (
        "test_absent_hardware_is_planned",
        "test_experts_are_planned_on_any_mesh_from_one_trace",
        "test_states_between_steps_are_exact",
        "test_tokens_are_copied_per_expert_only_where_xla_does",
    ),
    "planner/test_search.py": ("test_quick_memory_of_experts_is_close_to_the_trace",),
    "planner/test_tpu_padding.py": ("test_states_on_tpus_are_the_compilers_to_the_counters",),
    "spmd/test_disaggregated.py": (
        "test_a_frozen_disaggregated_encoder",
        "test_what_is_not_finite_on_one_side_is_skipped_on_both",
    ),
    "spmd/test_federated_sgd.py": ("test_one_step_of_sgd_at_each_site_is_data_parallel",),
    "spmd/test_pair_stages.py": ("test_embeddings_and_gradients_go_through_stages",),
    "spmd/test_transfer.py": ("test_every_part_comes_from_its_own_process",),
    "sweep/test_definition.py": ("test_an_id_is_of_the_values_however_they_are_written",),
    "sweep/test_gke_sweep.py": ("test_a_sweep_that_is_killed_makes_nothing_twice",),
    "sweep/test_schedule.py": (
        "test_a_sweep_that_is_killed_at_any_moment_misses_nothing_and_repeats_nothing",
    ),
    "sweep/test_slurm_sweep.py": ("test_every_trial_is_a_job_and_what_fails_is_named",),
    "test_isolation.py": ("test_a_files_tests_share_a_process",),
    "train/test_frozen_dtypes.py": (
        "test_bfloat16_gives_the_bits_of_float32_and_is_not_cast",
        "test_outputs_have_the_same_bits",
    ),
    "train/test_islands.py": (
        "test_an_outer_update_sends_each_change_once_and_a_quarter_in_8_bits",
        "test_islands_are_diloco",
        "test_moments_may_start_anew",
        "test_what_was_sent_and_what_is_held_is_what_was_changed[int",
    ),
    "train/test_step.py": (
        "test_layers_that_are_not_run_are_not_decayed",
        "test_remat_changes_no_gradient_and_applies_to_both_towers",
    ),
    "trainer/test_pair_design.py": (
        "test_texts_that_are_cut_to_the_same_tokens_are_one",
        "test_what_teaches_nothing_is_refused",
    ),
    "trainer/test_unreached.py": ("test_a_run_on_texts_keeps_the_vision_encoders_bits",),
}
"""The same of tests that are long."""


def mark(items: list[Any]) -> None:
    """Mark the collected tests that are named above."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        for table, what in ((TESTS, pytest.mark.exhaustive), (LONG, pytest.mark.long)):
            if name.startswith(table.get(file.removeprefix("tests/"), ("\0",))):
                item.add_marker(what)
