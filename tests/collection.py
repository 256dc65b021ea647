"""Which tests are collected, by their markers; and what the garbage collector need not look through again."""

from __future__ import annotations

import gc
import types
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import settings

from leanconv.bench import run as bench_run
from leanconv.runtime.driver import CudaError
from leanconv.runtime.launch import why_no_gpu
from tests import proof


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped, with the reason, where there is none")
    config.addinivalue_line("markers", "slow: compares speed, so it wants the machine to itself")
    config.addinivalue_line("markers", "exhaustive: one more of many that are alike; `make test-all` runs it")
    # what `make test` draws is the same in each run; `make test-all` draws anew
    settings.register_profile("drawn alike", derandomize="not exhaustive" in config.option.markexpr)
    settings.load_profile("drawn alike")


def pytest_sessionstart(session: pytest.Session) -> None:
    proof.every_order = "not exhaustive" not in session.config.option.markexpr


#: Functions of many tests of one kind: ``make test`` runs a third of each, and the first of every algorithm; ``make
#: test-all`` runs all.
THINNED = {
    "test_a_broken_ring_is_reported", "test_algorithms_keep_the_bound_on_the_emulator",
    "test_algorithms_of_the_cpu_engine_keep_the_bound", "test_an_image_has_the_same_bits_in_every_batch",
    "test_bands_of_several_rows_are_right", "test_batch_is_not_compiled_in", "test_best_guess_compiles_without_spills",
    "test_configurations_fit_the_machine", "test_cupy_arrays_are_read_in_place", "test_drawn_convolutions_are_right",
    "test_each_winograd_kernel_keeps_its_precision", "test_errors_on_data_of_every_range",
    "test_every_configuration_fits_and_takes_what_is_said", "test_every_configuration_is_right",
    "test_every_function_is_scipys", "test_every_kernel_is_right_whole_and_cut",
    "test_every_kernel_of_im2col_winograd_compiles_without_spills", "test_every_layer_is_right", "test_every_tile",
    "test_every_tile_and_way_of_reading", "test_every_way_of_reading_pixels", "test_extreme_configs_right_on_emulator",
    "test_filters_are_prepared_alike_for_every_size_of_image", "test_filters_on_images_larger_than_a_strip",
    "test_first_layers", "test_images_larger_than_a_strip", "test_layers_larger_than_a_block",
    "test_no_output_is_off_by_more_than_its_bound_on_the_emulator", "test_numpy",
    "test_prepared_filters_are_those_of_the_forward_convolutions", "test_pytorch_cpu_tensors",
    "test_pytorch_tensors_on_a_gpu_are_read_as_they_lie", "test_right_on_emulator", "test_runs_are_right_on_emulator",
    "test_segments_of_rows_are_right_and_touch_nothing_else", "test_sums_of_products",
    "test_the_cpu_engine_keeps_the_bound_of_the_precision", "test_the_oracle_agrees_with_pytorch",
    "test_unaligned_images_right_on_emulator", "test_values_are_those_of_pytorch",
    "test_what_an_algorithm_declines_is_refused_with_its_reasons",
    "test_what_is_no_number_reaches_just_the_results_that_see_it", "test_wide_offsets_right_on_emulator",
    "test_windows_of_all_kinds_are_right", "test_windows_that_begin_inside_the_image_right_on_emulator",
    "test_windows_that_cover_far_more_than_they_read",
}  # fmt: skip


def thin_out(items: list[pytest.Item]) -> None:
    """Mark two of three tests of `THINNED` functions as exhaustive, by name; but not the first of an algorithm."""
    met = set()
    for item in items:
        function = item.nodeid.partition("[")[0].rpartition("::")[2]
        given = getattr(item, "callspec", None)
        if function not in THINNED or given is None or "exhaustive" in item.keywords:
            continue
        of = (function, getattr(given.params.get("algorithm"), "stem", ""))
        if (of in met or not of[1]) and zlib.crc32(item.nodeid.encode()) % 3:
            item.add_marker(pytest.mark.exhaustive)
        met.add(of)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Most of what `THINNED` functions have is for ``make test-all``.

    Without a GPU each function of a marked test is skipped once, with the reason, for all of its parameters.
    """
    thin_out(items)
    marked = [item for item in items if "gpu" in item.keywords]
    if not marked:
        return
    try:
        why = why_no_gpu()
    except CudaError:
        return  # there is one that does not work, as the marked tests will tell
    if not why:
        return
    shown = {item.nodeid.partition("[")[0]: item for item in reversed(marked)}.values()
    for item in shown:
        item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {why}"))
    left = set(marked).difference(shown)
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """What is there to stay is not looked through again: of tests that collect garbage that is most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _what_is_frozen_stays() -> Iterator[None]:
    """A run of the benchmark freezes what is there, and lets it go behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_run, "gc", types.SimpleNamespace(collect=gc.collect, freeze=gc.freeze, unfreeze=int))
        yield
