"""Each "yes" in our column of docs/compared.md has a test that proves it."""

import re

from tests.docs_pages import ROOT

PROOFS = {
    'large contrastive batches by a gradient cache': (
        'engine/test_sliced_exactness.py',
        'test_gradient_cache_replays_dropout_and_drop_path',
    ),
    'slices of one batch, for additive losses': (
        'engine/test_sliced.py',
        'test_accumulation_follows_the_plain_step',
    ),
    'refuses to accumulate a loss in which samples meet': (
        'engine/test_sliced.py',
        'test_iterations_of_a_coupled_loss_are_accumulated_on_request_only',
    ),
    'activation checkpointing by a setting': (
        'techniques/activation_checkpointing/test_checkpoint_activations.py',
        'test_same_steps',
    ),
    'activations on the host': ('techniques/test_activation_offload.py', 'test_same_steps'),
    'cheap ops computed again, without a product': (
        'techniques/compression/test_recomputed_activations.py',
        'test_less_is_kept_and_no_product_computed_again',
    ),
    'dropped or quantised activations': (
        'techniques/compression/test_quantized_activations.py',
        'test_forward_is_plain_and_the_error_falls_with_the_bits',
    ),
    'compiled blocks': ('techniques/test_compiling.py', 'test_same_steps'),
    'contrastive losses over ranks, in tiles': (
        'losses/test_disco.py',
        'test_ranks_equal_one_process',
    ),
    'sharding (`fully_shard`)': (
        'techniques/sharding/test_materializing.py',
        'test_one_unit_after_the_other_is_the_same',
    ),
    'optimiser in fewer bytes': (
        'techniques/optimizer_memory/test_adamw_bf16.py',
        'test_state_takes_half_the_bytes',
    ),
    'what a step takes, predicted without running it': (
        'memory/test_prediction.py',
        'test_the_peak_of_the_course_is_the_predicted_one_and_explained',
    ),
    'a plan that keeps a budget': (
        'memory/test_planning.py',
        'test_the_fewest_slices_that_fit_are_chosen',
    ),
    'smaller slices after running out of memory': (
        'simulated_gpu/test_out_of_memory.py',
        'test_at_every_allocation_of_a_step',
    ),
    'pairs of techniques tested': ('test_composition.py', 'test_some_pairs'),
    'compare a step with the plain one, in the run': (
        'engine/hooks/test_exactness.py',
        'test_a_wrong_technique_stops_the_run_before_the_update',
    ),
    'mixed precision': ('engine/test_optim.py', 'test_precision_is_that_of_the_parameters_device'),
    'goes on from any iteration, bit for bit': (
        'engine/test_resume.py',
        'test_resume_after_any_iteration_is_bit_exact',
    ),
    'NaN: step skipped, batch captured, replayed': (
        'engine/faults/test_replay.py',
        'test_a_fault_is_replayed_and_named',
    ),
    'checkpoints read without running code': (
        'models/test_untrusted_weights.py',
        'test_a_backbone_s_file_runs_nothing',
    ),
    'a misspelt setting is refused': (
        'engine/config/test_check.py',
        'test_every_misspelt_key_of_our_configs_is_refused',
    ),
    'collapse of features is watched': (
        'engine/hooks/test_collapse.py',
        'test_each_sign_is_warned_of_once_and_after_patience',
    ),
    'Slurm, several machines': (
        'test_launching.py',
        'test_slurm_script_and_each_sample_goes_to_one_rank_once',
    ),
    'detection, segmentation': (
        'models/test_detector.py',
        'test_a_step_in_slices_is_the_plain_step',
    ),
    'figures to TensorBoard, W&B, MLflow': (
        'engine/cli/test_console.py',
        'test_curves_go_to_tensorboard_by_one_word',
    ),
    'the run as a page: curves, embeddings over time, memory': (
        'engine/hooks/test_report.py',
        'test_the_map_is_of_held_out_samples_at_each_evaluation',
    ),
    'folders without labels': ('datasets/test_split.py', 'test_a_folder_without_labels'),
    'Hugging Face data sets': ('datasets/test_hugging_face.py', 'test_a_folder_and_its_splits'),
    'webdataset shards': (
        'datasets/streamed/test_streamed.py',
        'test_batches_of_workers_go_on_in_mid_epoch',
    ),
    'frames of a video as views': (
        'datasets/test_video.py',
        'test_each_view_is_of_another_frame_and_of_the_sample_s_seed',
    ),
    'augmentation on the GPU': (
        'datasets/batched/test_on_device.py',
        'test_views_are_the_same_wherever_they_are_made',
    ),
    'files decoded on the GPU': (
        'datasets/batched/test_on_device.py',
        'test_files_that_are_decoded_late_give_the_same_views',
    ),
    'linear probe, k-NN': ('evaluation/after_training/test_commands.py', 'test_probe'),
    'features in files by a command': (
        'evaluation/after_training/test_commands.py',
        'test_embed_goes_on_where_it_was_broken_off',
    ),
    'zero-shot, retrieval': (
        'evaluation/after_training/test_texts.py',
        'test_zeroshot_by_names_of_classes',
    ),
    'export to timm, torchvision, transformers, ONNX': (
        'evaluation/after_training/test_export.py',
        'test_timm_reads_it',
    ),
    'runs beside other trainers': ('test_beside.py', 'test_same_step_in_fewer_bytes'),
}


def test_each_yes_has_a_test():
    text = (ROOT / 'docs/compared.md').read_text()
    rows = re.findall(r'^\| ([^|]+) \|.*\| (yes\b[^|]*) \|$', text, re.M)
    assert len(rows) > 30 and {name for name, _ in rows} == {*PROOFS}
    for name, (path, test) in PROOFS.items():
        assert f'def {test}(' in (ROOT / 'tests' / path).read_text(), name
