"""Tests of what names no device, with all of it on the simulated one.

``python -m pytest -p tests.simulated_gpu.everywhere tests/techniques``, as ``make gpu-sim`` does.
What means the CPU in them is skipped, and says why.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated_gpu.device import REASON, torch

pytest_plugins = ['tests.simulated_gpu.device']
_DRAWING = (torch.rand, torch.randn, torch.randint, torch.randperm)

_TECHNIQUES = 'tests/techniques/'
MEANS_THE_CPU = {
    'two values are a bit, and what is worth it is looked at, on CPU only': [
        'codecs/test_in_parts.py::test_a_third_value_in_a_later_part_is_found',
        'codecs/test_lossless.py::test_dropouts_noise_in_one_bit',
        'codecs/test_lossless.py::test_dropout_on_cpu_end_to_end',
        'codecs/test_lossless.py::test_any_two_values_bit_for_bit',
        'codecs/test_lossless.py::test_codes_are_apart_from_the_tensor',
        'codecs/test_lossless.py::test_on_an_accelerator_the_known_bound_counts',
        'compression/test_recomputed_activations.py::test_a_step_is_the_plain_one_bit_for_bit'
        '[layer norm, masked dropout-float32-bf16]',
    ],
    'is about the statistics of random numbers, which are others than a GPU draws': [
        'codecs/test_quantized.py::test_rounding_is_unbiased',
        'codecs/test_quantized.py::test_biased_roundings_fail_that_test',
        'codecs/test_quantized.py::test_errors_of_neighbours_are_independent',
        'codecs/test_running_range.py::test_the_mean_is_the_clipped_tensor',
        'codecs/test_sparse.py::test_random_is_uniform_and_exact',
        'compression/test_quantized_activations.py::test_the_mean_of_the_gradient_is_the_plain_one',
    ],
    'one operation of attention, which the simulated GPU lacks': [
        'compression/test_cost.py::test_calls_for_each_saved_tensor[',
        'compression/test_quantized_activations.py::'
        'test_attention_has_the_gradient_of_what_its_codes_give_back',
        'compression/test_quantized_activations.py::test_products_are_as_many_as_without[4-True]',
        'activation_checkpointing/test_checkpoint_activations.py::test_attention_only',
        'activation_checkpointing/test_checkpoint_activations.py::test_ops_that_occur_in_some_of_the_modules',
    ],
    'products of sparse tensors are of a library that the simulated GPU lacks': [
        'compression/test_replay.py::test_what_is_sparse_passes_by_plan[',
    ],
    'cells of recurrent networks have kernels of their own on a GPU, and none on a CPU': [
        'test_activation_offload.py::test_gates_that_are_computed_in_place_in_one_memory[LSTM]',
        'test_activation_offload.py::test_gates_that_are_computed_in_place_in_one_memory[GRU]',
        'activation_checkpointing/test_other_calls.py::test_sequences_of_another_length[GRU-',
        'activation_checkpointing/test_other_calls.py::test_sequences_of_another_length[LSTM-',
    ],
    'is about a model on the CPU': [
        'layers/test_sync_batchnorm.py::test_a_model_on_the_cpu_takes_layers_that_run_there',
        'modules/test_forward_state.py::test_modules_on_the_cpu_have_no_accelerators',
        'sharding/test_materializing.py::test_one_unit_after_the_other_is_the_same',
        'test_unnoticed.py::test_offload_brings_back_what_was_saved',
    ],
    'fresh memory of the simulated GPU is not filled with NaN': [
        'test_unnoticed.py::test_checkpointing_stops_before_the_noise_of_a_function_is_filled',
    ],
    'counts bytes that are allocated on the CPU': [
        'optimizer_memory/test_in_backward.py::test_the_allocator_holds_that_much_less',
        'sharding/test_shard_model.py::'
        'test_with_offload_a_step_holds_less_than_two_blocks_on_the_device',
    ],
    'loaders make batches on the default device, which workers and pinned memory cannot have': [
        'test_technique.py::test_the_base_config_of_each_is_checked_and_trains',
    ],
    'TorchScript compiles what it has run often for the GPU itself, which ends the process here': [
        'modules/test_torchscript.py::test_checkpointing[',
        'modules/test_torchscript.py::test_the_gradient_cache_repeats_slices_as_they_were',
    ],
    'compiling takes long, and what it makes here is not what a GPU runs': [
        'activation_checkpointing/test_checkpoint_activations.py::test_a_whole_model_under_compile',
        'conv_bn/test_conv_bn_eval_composed.py::test_compile',
        'modules/test_blocks_of_others.py::test_checkpointed_compiled_and_offloaded',
        'test_activation_offload.py::test_under_compile',
        'test_compiling.py::test_blocks_share_one_compilation',
        'test_compiling.py::test_names_state_copies_pickles_and_undo',
        'test_compiling.py::test_same_steps',
        'test_compiling.py::test_statistics_count_once_with_checkpointing[options1]',
        'test_compiling.py::test_with_checkpointing_and_offload',
    ],
    'takes long, and asks nothing of a device that others do not': [
        'activation_checkpointing/test_checkpoint_activations.py::'
        'test_a_budget_is_kept_and_costs_less_than_its_share',
        'conv_bn/test_conv_bn_eval_models.py::test_mmengine_beside',
        'conv_bn/test_conv_bn_eval_models.py::test_pairs_and_bytes',
        'conv_bn/test_gradient.py::test_first_and_second_derivatives_by_finite_differences',
        'optimizer_memory/test_adamw_bf16.py::test_it_learns_the_digits_as_adamw_does',
    ],
    'code that Inductor makes is for the CPU here': [
        'slices/test_frozen_part.py::test_a_compiled_part_runs_once',
        'slices/test_grad_cache_corners.py::test_compiled_encoders',
    ],
    'NumPy looks at the values, or they are drawn on the CPU': [
        'codecs/test_quantized.py::test_top_level_never_spills',
        'codecs/test_top_k.py::test_positions_are_those_of_nonzero',
    ],
    'counts bytes or ties of the form that the CPU has': [
        'codecs/test_quantized.py::test_blocks_of_a_large_tensor_take_little_memory',
        'codecs/test_sparse.py::test_zeros_need_no_bytes',
        'codecs/test_sparse.py::test_bytes[',
        'codecs/test_sparse.py::test_above_a_third_it_never_costs_more',
        'codecs/test_sparse.py::test_values_in_few_bits',
        'codecs/test_sparse.py::test_cast[',
        'codecs/test_top_k.py::test_largest_leaves_out_zeros_and_as_many_ties_as_it_must',
    ],
    'is about operations that have other names on a device': [
        'compression/test_quantized_activations.py::'
        'test_layers_inputs_may_be_dropped_and_the_rest_quantised',
        'compression/test_quantized_activations.py::test_what_is_needed_at_once_is_decoded_once',
        'compression/test_recomputed_activations.py::'
        'test_the_norm_that_is_not_a_librarys_is_compared_each_time',
        'compression/test_recomputed_activations.py::'
        'test_one_that_no_version_counts_is_an_error_when_it_is_compared',
    ],
    'autocast and scaling of the CPU': [
        'layers/test_weight_norm.py::test_bf16_is_no_further_from_float64_than_the_parametrisation',
        'slices/test_grad_cache_precision.py::',
        'slices/test_slicing.py::test_precision_and_scaler_are_the_callers',
    ],
    'reads the warning of another error': [
        'codecs/test_kernels.py::test_after_an_error_they_are_given_up_with_one_warning',
    ],
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for reason, tests in MEANS_THE_CPU.items():
        for test in tests:
            for item in items:
                if item.nodeid.startswith(_TECHNIQUES + test):
                    item.add_marker(pytest.mark.skip(reason=f'means the CPU: {reason}'))


class _Drawn(torch.overrides.TorchFunctionMode):
    """What tests draw with a generator of the CPU is drawn there, and brought to the device."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        generator = kwargs.get('generator')
        drawn_there = generator is not None and generator.device.type == 'cpu'
        if function in _DRAWING and drawn_there and kwargs.get('device') is None:
            return function(*args, **{**kwargs, 'device': 'cpu'}).cuda()
        return function(*args, **kwargs)


if REASON is None:
    torch.set_default_device('cuda')
    _Drawn().__enter__()
