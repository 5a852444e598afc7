"""No operation reads or writes on the host what a GPU has in its own memory.

The double has it in the host's. A kernel for GPUs whose registration forgets a HostMemory, or an
operation that looks into an input, works there all the same; but not where inputs are hidden.
"""

from __future__ import annotations

import signal

import pytest
import tensorflow.compat.v1 as tf

from tests.gpu_double import hidden
from tests.kernels.gpu.nested import run_tests

pytestmark = pytest.mark.skipif(
    not tf.test.is_built_with_cuda(),
    reason="this TensorFlow is built without GPUs: no kernels say what is on the host",
)

IN_MATRIX = ("requests", "ask", "writes")
LONG = ("ask_bags", "bags", "spread_bags", "pooling", "reduction", "reduced_updates")


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests, chosen",
    [
        ("host_waits", ""),
        # Except for one of inputs that lie side by side, as copies of them don't.
        *(
            pytest.param(f"compiled_{name}", "not side_by_side", marks=pytest.mark.matrix)
            for name in IN_MATRIX
        ),
        *(pytest.param(f"compiled_{name}", "", marks=pytest.mark.long) for name in LONG),
        pytest.param("compiled_updates", "not side_by_side", marks=pytest.mark.long),
        # Others feed inputs of operations.
        pytest.param("dynamic_tables_on_device", "trained_as", marks=pytest.mark.long),
    ],
)
def test_inputs_on_the_device_are_left_to_kernels(tests: str, chosen: str):
    """By the operations' own tests."""
    finished = run_tests(tests, "-k", chosen, **{hidden.WANTED: "1"})
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["splits", pytest.param("headers", marks=pytest.mark.matrix)])
def test_a_read_on_the_host_is_a_fault(forgotten: str):
    """As if the kernel for GPUs were registered without this input as HostMemory."""
    finished = run_tests(
        "compiled_operations",
        "-k",
        "rows_are_gathered",
        first=f"from tests.gpu_double import hidden; hidden.use(['{forgotten}'])",
    )
    assert finished.returncode == -signal.SIGSEGV, finished.stdout + finished.stderr
