"""The tests of `python -m pytest -m long`: the suite leaves them out, and `.ci/long` runs them.

Each takes seconds or minutes, and what it claims is tested in the suite, too: by another case of
it (more ranks, another strategy, the next of many planted bugs), or by what it is made of (the
commands of a page, the result of a recipe). A line is a test, or how the names of its cases begin.
"""

LONG = {
    # More strategies, ranks and sizes of what other cases show.
    "activations": "what_is_computed_again_draws_and_gathers_as_in_the_forward[strategy1",
    "compiled": """
        a_few_sizes_of_batches_are_compiled_by_themselves[a shorter last batch
        a_few_sizes_of_batches_are_compiled_by_themselves[many sizes
    """,
    "evaluation": """
        a_prediction_larger_than_its_memory_is_written
        predictions_are_all_rows_in_the_order_of_the_data_set[ddp-4-rows
        predictions_are_all_rows_in_the_order_of_the_data_set[ddp-4-tensors
        validation_and_test_see_every_row_once_with_the_weight_of_the_task[ddp-4-
    """,
    "finetuning": """
        frozen_thawed_and_averaged_weights_are_those_by_hand_and_resume_to_the_bit[data_parallel
        frozen_thawed_and_averaged_weights_are_those_by_hand_and_resume_to_the_bit[ddp-2
        frozen_thawed_and_averaged_weights_are_those_by_hand_and_resume_to_the_bit[fsdp-2-frozen
        frozen_thawed_and_averaged_weights_are_those_by_hand_and_resume_to_the_bit[fsdp-2-thawed
    """,
    "from_python": """
        a_compiled_run_says_why_its_first_step_takes_so_long
        a_program_of_many_open_files_starts_ranks
        a_trainer_starts_its_ranks_that_draw_the_same_rows_and_takes_over_what_they_came_to[strategy1
        a_trainer_trains_once_unless_it_resumes[given2
        a_warning_of_all_ranks_is_printed_once
        hooks_have_the_trainer_that_a_program_makes[strategy1
        ranks_refuse_the_directory_of_another_run
        the_ranks_of_a_trainer_have_the_torch_settings_of_the_program
        the_trainer_of_a_program_shows_it_in_the_first_of_its_ranks
        what_a_script_defines_is_compiled_in_its_ranks
    """,
    "fsdp": """
        a_model_that_does_not_fit_one_rank_trains_on_four
        a_task_that_one_rank_builds_has_the_numbers_of_one_that_all_build
        a_whole_checkpoint_takes_room_for_all_parts_in_the_main_rank
        parts_train_as_whole_weights_do[2 x 2 ranks-
        ten_blocks_take_no_more_to_compile_than_three
    """,
    "gallery": """
        a_resume_within_an_epoch_ends_in_the_same_state_to_the_bit[gpt
        clip_learns_to_find_captions_and_prints_some
        gan_learns_to_draw_digits_and_prints_some
        gpt_learns_to_write_stories_and_prints_what_it_writes
        gpt_with_dropout_but_in_attention_trains_alike_on_any_number_of_replicas
        logical_shares_have_the_same_bits_on_ranks_as_in_one_process
        replicas_train_as_one_process[FSDP-2-
        stream_learns_when_it_is_slow_and_prints_the_day
        text_learns_that_a_tag_depends_on_the_words_around_it
        the_experiment_of_gpt_2_trains_on_the_stories_and_validates
        the_experiment_with_muon_learns_more_in_as_many_steps_as_adamw
    """,
    "input": "a_tables_rows_are_predicted_in_their_order_on_each_strategy[words0",
    "logical": """
        a_job_that_restarts_itself_ends_with_the_bits_of_one_process
        ranks_have_the_bits_of_one_process[4-
    """,
    "numbers": "a_compiled_task_is_one_graph_and_trains_alike_under_the_same_names",
    "parity": """
        one_process_equals_the_hand_written_loop[lenet-1-32
        ranks_equal_the_hand_written_loop[DDP-2-
        ranks_equal_the_hand_written_loop[DDP-4-
        ranks_equal_the_hand_written_loop[FSDP-2-
    """,
    "programs": """
        a_program_is_right_or_noticed[data_parallel-2
        a_program_is_right_or_noticed[ddp-2
        a_program_is_right_or_noticed[fsdp-2
    """,
    "prune": "a_run_that_is_worse_than_the_median_of_those_before_it_is_stopped[ddp",
    "ranks": """
        a_run_that_makes_no_progress_shows_its_stacks_and_ends
        the_threads_of_a_ranks_group_end_before_its_interpreter
        torchrun_gives_the_weights_of_our_own_launch_in_one_directory[fsdp-
    """,
    "restarts": """
        a_job_restarts_itself_and_ends_with_the_same_weights[0-data
        a_job_restarts_itself_and_ends_with_the_same_weights[1-exit0
        a_job_that_fails_more_often_than_it_may_ends_with_the_failure
        a_job_without_a_checkpoint_begins_again_and_draws_one_curve
    """,
    "resume": "neither_a_save_nor_a_resume_at_any_step_changes_a_bit_of_a_run[ddp",
    "rows": "a_compiled_step_draws_the_same",
    "samplers": """
        training_in_the_order_of_a_sampler_equals_the_hand_written_loop[cpu-1
        training_in_the_order_of_a_sampler_equals_the_hand_written_loop[data_parallel-2
        training_on_a_ready_data_loader_equals_the_hand_written_loop[data_parallel-2
    """,
    "sharded": """
        a_rank_that_is_killed_within_a_save_costs_that_save_alone[a part
        a_rank_that_is_killed_within_a_save_costs_that_save_alone[best.ckpt
        a_rank_that_is_killed_within_a_save_costs_that_save_alone[what is not needed
        a_run_goes_on_with_parts_or_without[cpu-fsdp 2 x 2
        a_run_goes_on_with_parts_or_without[fsdp 4-fsdp 3
        a_run_goes_on_with_parts_or_without[fsdp 4-fsdp 4
        fifty_loads_on_three_ranks_are_alike
        several_checkpoints_write_their_shards_one_after_another
        thawed_unused_and_tied_weights_of_two_optimizers_go_on[fsdp 3
    """,
    "stream": "a_stream_is_resumed_to_the_bit[cpu-1-",
    "sweep_resume": """
        a_device_that_fails_ends_its_run_and_the_others_run_in_other_processes[cpu
        a_sweep_that_is_killed_or_interrupted_in_a_run_is_gone_on_with[ddp
        a_sweep_that_still_runs_is_not_gone_on_with_by_another_process
    """,
    "task_metrics": "results_are_those_of_one_metric_over_all_rows_of_the_pass[ddp-4-",
    "torchrun": """
        a_job_that_is_restarted_goes_on_from_its_last_checkpoint
        a_machine_that_is_lost_leaves_the_other_one_to_go_on
        ctrl_c_on_either_agent_ends_both_with_one_checkpoint[1-
    """,
    "turns": """
        optimizers_that_take_turns_train_as_a_loop_by_hand[ddp 2
        optimizers_that_take_turns_train_as_a_loop_by_hand[fsdp 3-plain
    """,
    "batch_norm": """
        ranks_are_as_one_process_also_where_one_has_no_row[ddp-4-1d
        ranks_are_as_one_process_also_where_one_has_no_row[ddp-4-2d
    """,
    "directory": "the_sockets_of_data_workers_need_no_short_tmpdir",
    "dropout": """
        numbers_are_dropped_independently_of_each_other[0.02
        numbers_are_dropped_independently_of_each_other[0.5
    """,
    "dynamo": """
        every_stock_optimiser_steps_alike_to_the_bit_and_calls_its_hooks
        torch_compile_still_works_where_its_import_is_skipped
    """,
    "ending": "the_best_weights_are_tested_after_fit[cpu",
    "exact_layers": """
        a_compiled_step_with_batch_norm_of_all_rows_ends_a_graph_at_each
        a_compiled_step_with_dropout_by_row_is_a_graph_for_each_size[vit-strategy0-2
        a_model_that_is_compiled_by_its_task_drops_the_same[DataParallel
        however_it_is_used_it_is_as_in_one_process[data_parallel-3-
        it_is_as_in_one_process[data_parallel-2-mobilenet
        it_is_as_in_one_process[data_parallel-2-resnet
        it_is_as_in_one_process[ddp-2-mobilenet
        it_is_as_in_one_process[ddp-2-resnet
    """,
    "fakenccl": """
        a_collective_lets_the_host_go_on
        a_group_that_ends_before_its_collectives_do_is_noticed
    """,
    "from_scratch": "it_passes_every_check_as_its_readme_shows_with_nothing_but_send_and_recv",
    "front_door": "the_cores_own_tests_pass_without_the_plugins",
    "install": """
        a_module_in_the_current_directory_is_a_target[words0
        a_new_project_trains_from_a_wheel
        a_repository_runs_without_an_installation
        an_editable_installation_runs_anywhere
    """,
    "kubernetes": "the_command_of_a_manifest_trains_in_the_layout_of_the_image",
    "layer_fuzz": "a_random_network_is_the_same_or_told[strategy1-0-8",
    "localsgd": """
        fewer_rounds_send_less_and_learn
        its_own_tests_pass_where_it_is_installed
        what_its_readme_shows_is_what_it_prints
    """,
    "micro_batch": """
        a_batch_in_pieces_trains_as_one[data_parallel-3
        a_batch_in_pieces_trains_as_one[ddp-2
    """,
    "parametrized": """
        a_layer_without_weights_is_one_line[strategy2
        a_parametrized_task_trains_on_ranks_of_a_program_as_on_one_process[strategy1
    """,
    "parcel": "the_program_and_each_of_its_ranks_have_one_copy_of_a_model",
    "points": """
        a_point_is_what_hydra_composes_of_it[added
        a_point_is_what_hydra_composes_of_it[deleted
        a_point_is_what_hydra_composes_of_it[nested
        a_point_is_what_hydra_composes_of_it[numbers
        a_point_is_what_hydra_composes_of_it[of the environment
        a_point_is_what_hydra_composes_of_it[whole
        a_point_is_what_hydra_composes_of_it[words
    """,
    "prepare": """
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_batch_start]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_before_step]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_epoch_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_epoch_start]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_exception]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_fit_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_load]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_predict_batch_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_predict_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_predict_start]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_save]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_step_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_test_batch_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_test_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_test_start]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_validation_batch_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_validation_end]
        a_trainer_is_freed_with_its_last_reference_whatever_hooks_there_are[on_validation_start]
    """,
    "task": """
        a_loss_over_the_rows_of_all_replicas_is_the_one_of_one_process[ddp-4-Pairs-5-1
        a_loss_over_the_rows_of_all_replicas_is_the_one_of_one_process[ddp-4-Pairs-5-3
    """,
    "together": """
        every_strategy_trains_as_one_replica_and_a_resume_goes_on_on_others[data_parallel-2
        every_strategy_trains_as_one_replica_and_a_resume_goes_on_on_others[data_parallel-3
        every_strategy_trains_as_one_replica_and_a_resume_goes_on_on_others[ddp-2
    """,
    "callbacks": "a_rank_that_stops_alone_ends_all_of_them_at_the_same_step_with_its_reason[FSDP",
    "optimizer_modes": "all_strategies_have_the_same_weights[make1",
    "signals": """
        ctrl_z_stops_all_processes_of_a_job_and_fg_after_its_limits_goes_on
        what_is_stuck_ends_when_the_grace_period_is_over[setting2-sleep
    """,
    # The next of many moments, bugs, doors and values.
    "completion": "a_shell_completes[bash-dpframe]",
    "conf": """
        every_option_is_composed_and_built[experiment-gpt2_124m
        every_pair_of_recipe_and_experiment_composes
    """,
    "fakecuda": """
        a_bug_that_is_planted_in_dpframe_fails_its_test
        a_command_has_its_gpus_whatever_is_hidden_and_within_another_one
        what_is_planted_is_noticed
        what_is_right_is_left_alone
    """,
    "hints": "what_a_hint_says_is_taken_and_torch_is_not_imported",
    "interpreter": """
        ctrl_c_is_its_own_to_end_by
        what_can_not_be_sent_back_is_told_as_text
    """,
    "jobs": "runs_have_their_shares_of_the_cores_and_one_that_fails_or_is_killed_is_told",
    "lr_schedule": "any_recipe_takes_one_by_its_name_and_so_does_a_folder_of_ones_own",
    "modes": """
        a_mode_of_a_package_evaluates_a_checkpoint_with_the_config_of_its_run
        a_sweep_compares_what_a_mode_returns_or_nothing
    """,
    "oracle": """
        a_resume_that_is_killed_at_a_change_to_its_files_is_resumed_from_there
        killed_after_any_step_a_run_ends_as_if_nothing_had_happened[2-
        the_comparison_notices_a_resume_that_forgets
    """,
    "preparation": """
        a_program_has_it_called_in_its_ranks
        ctrl_c_in_it_ends_the_job[cpu
        of_two_machines_with_a_common_disk_one_downloads
    """,
    "security": """
        a_loose_checkpoint_hides_no_module_of_the_current_directory[..
        a_loose_checkpoint_hides_no_module_of_the_current_directory[checkpoints
        what_a_run_directory_names_is_not_called[mode=validate
        what_a_run_directory_names_is_not_called_by_load
    """,
    "share_check": """
        no_weight_and_nothing_large_is_copied[attribute
        no_weight_and_nothing_large_is_copied[buffer
        no_weight_and_nothing_large_is_copied[frozen
        of_random_steps_no_honest_one_is_refused_and_no_planted_term_is_missed[dtype1
    """,
    # What a plugin does beyond the first case.
    "compare": """
        a_strategy_whose_package_is_missing_is_left_out_unless_it_is_named
        a_training_that_ends_with_its_warm_up_has_a_rate
        there_is_a_row_of_one_replica[None
    """,
    "doctor": "with_a_recipe_it_counts_what_a_step_computes",
    "export": """
        a_trained_recipe_predicts_the_same_by_torch_alone_and_what_does_not_is_told
        weights_of_a_task_that_torch_can_not_export_are_written_with_the_reason
    """,
    "testing": """
        a_planted_bug_fails_its_checks_with_the_cause[Averages
        a_planted_bug_fails_its_checks_with_the_cause[Backwards
        a_planted_bug_fails_its_checks_with_the_cause[GathersNumbers
        a_planted_bug_fails_its_checks_with_the_cause[HalfIfFloat32
        a_planted_bug_fails_its_checks_with_the_cause[LeavesThread
        a_planted_bug_fails_its_checks_with_the_cause[LogsEverywhere
        a_planted_bug_fails_its_checks_with_the_cause[NeverQuiet
        a_planted_bug_fails_its_checks_with_the_cause[Other
        a_planted_bug_fails_its_checks_with_the_cause[SameMasks
        a_planted_bug_fails_its_checks_with_the_cause[Share
        a_planted_bug_fails_its_checks_with_the_cause[TopKLarge
        a_planted_bug_fails_its_checks_with_the_cause[Unshared
        a_recipe_without_a_curve_is_tried_for_its_rows_evaluation_checkpoint_and_order
        mode_verify_exits_with_1_where_a_check_fails_in_a_sweep_too
        the_strategies_pass_every_check[CPU
        the_strategies_pass_every_check[FSDP
        the_strategies_pass_every_check[SingleGPU
        the_strategies_pass_every_check[data_parallel
    """,
    # What pages show and recipes come to, a new project, the benchmarks.
    "api": """
        notebooks_run
        the_programs_of_the_page_run[compare_strategies.py
        the_programs_of_the_page_run[lines_by_hand.py
    """,
    "benchmarks": """
        a_run_that_fails_is_told_with_its_command
        a_slow_link_has_a_row_for_a_method_and_leaves_no_host
        same_numbers_prints_a_row_a_run_and_succeeds
    """,
    "from_hydra_template": """
        its_module_data_and_configs_train_as_they_are_and_alike_on_two_processes
    """,
    "from_the_tutorials": """
        each_program_gives_the_same_in_threads
        every_command_runs
    """,
    "gpu_benchmark": """
        a_dry_run_measures_what_is_asked_for_and_writes_the_page
        the_tuned_loop_and_dpframe_train_the_same_thing[lenet
    """,
    "new": """
        help_has_an_installed_projects_options
        mypy_finds_nothing_in_a_new_project
    """,
    "plan": """
        help_and_an_assumption_that_can_not_be_import_no_torch
        the_command_prints_a_table_and_leaves_nothing
    """,
    "readme": """
        every_command_that_is_shown_composes
        sweeps_print_what_their_page_shows
        the_commands_of_a_page_run_one_after_another[docs/
    """,
    "recipes": """
        lenet_learns_the_digits_and_reports_its_speed
        the_words_best_and_last_name_no_run_of_debug_or_overfit
    """,
    "site": """
        every_link_of_the_site_leads_to_a_page_and_a_place_in_it
        no_page_of_the_site_loads_anything_from_elsewhere
        the_references_have_every_setting_and_every_public_name
    """,
}


def is_long(file: str, test: str) -> bool:
    """`test` has its case in brackets, if it has one."""
    name = test.removeprefix("test_")
    return any(
        name.startswith(line) if "[" in line else name.partition("[")[0] == line
        for line in lines_of(file.removeprefix("test_"))
    )


def lines_of(file: str) -> list[str]:
    return [line.strip() for line in LONG.get(file, "").splitlines() if line.strip()]
