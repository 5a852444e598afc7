"""Ranks are bound to the cores near their GPUs, as the driver's library tells them."""

import os
import subprocess
import sys
import textwrap

import pytest

from collective.launch.planning.environment import rank_environment
from collective.launch.planning.gpu_cores import bound_cores, described
from collective.launch.planning.plan import LaunchPlan

TWO_NODES = {"0": frozenset(range(8)), "GPU-b": frozenset(range(8, 16)), "2": frozenset()}
# Two GPUs: near the first are cores 0 and 64, near the second core 1. The third is unknown.
LIBRARY = r"""
#include <stdlib.h>
#include <string.h>
static int gpus[3] = {0, 1, 2};
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (index > 2) return 2;
    *handle = &gpus[index];
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (strcmp(uuid, "GPU-second")) return 6;
    *handle = &gpus[1];
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) { text[0] = 0; return 0; }
int nvmlDeviceGetCpuAffinity(void *handle, unsigned size, unsigned long *words) {
    int gpu = *(int *)handle;
    if (gpu == 2 || size < 2) return 3;
    words[0] = gpu ? 2 : 1;
    words[1] = gpu ? 0 : 1;
    return 0;
}
"""


def test_a_gpus_ranks_are_bound_to_available_cores_near_it():
    bound = bound_cores(["0", "GPU-b", "2", None], frozenset(range(4, 12)), TWO_NODES.__getitem__)
    assert bound == {"0": frozenset(range(4, 8)), "GPU-b": frozenset(range(8, 12))}


def test_nobody_is_bound_where_that_changes_nothing():
    one_node = frozenset(range(4))
    assert bound_cores(["0", "1"], one_node, lambda _: one_node | {9}) == {}
    assert bound_cores(["0"], one_node, lambda _: frozenset({9})) == {}
    assert bound_cores([None, None], one_node, TWO_NODES.__getitem__) == {}


@pytest.mark.parametrize(
    "devices, threads",
    [(("a", "b"), "8"), (("a", "a", "b", "b"), "4"), (("a", "a", "a", "a"), "2"), (("c",), "16")],
)
def test_threads_are_a_share_of_the_cores_that_a_rank_is_bound_to(devices, threads):
    bound = {"a": frozenset(range(8)), "b": frozenset(range(8, 16))}
    plan = LaunchPlan(("python",), devices, {}, 16, bound=bound)
    environment = rank_environment(plan, 0, "1", "board")
    assert environment["OMP_NUM_THREADS"] == environment["TF_NUM_INTRAOP_THREADS"] == threads


def test_cores_are_written_as_linux_does():
    assert described(frozenset({0, 1, 2, 5, 8, 9})) == "0-2,5,8-9"


@pytest.fixture(scope="module")
def with_driver(tmp_path_factory):
    """Gives the environment of processes in which a library stands in for the driver's."""
    folder = tmp_path_factory.mktemp("driver")
    library = folder / "libnvidia-ml.so.1"
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), "-x", "c", "-"]
    subprocess.run(command, input=LIBRARY.encode(), check=True)
    inherited = {name: value for name, value in os.environ.items() if "VISIBLE" not in name}
    return {**inherited, "LD_LIBRARY_PATH": str(folder)}


def test_the_driver_tells_by_index_and_by_uuid(with_driver):
    program = """
        from collective.launch.planning.gpu_cores import cores_near
        print([sorted(cores_near(each)) for each in ("0", "1", "2", "7", "GPU-second", "MIG-x")])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=with_driver,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "[[0, 64], [1], [], [], [1], []]", done.stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a machine with one core")
@pytest.mark.parametrize("bind", ["auto", "none"])
def test_ranks_run_on_these_cores(with_driver, tmp_path, bind):
    all_cores = sorted(os.sched_getaffinity(0))
    if not {0, 1} <= set(all_cores):
        pytest.skip("this process may not use the cores 0 and 1")
    script = tmp_path / "cores.py"
    script.write_text("import os; print(sorted(os.sched_getaffinity(0)))")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "collective.launch", "-np", "3", "--device", "gpu"),
            *("--bind", bind, "--independent", str(script)),
        ],
        env=with_driver,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    bound = [[0], [1], all_cores] if bind == "auto" else [all_cores] * 3
    assert sorted(done.stdout.splitlines()) == [f"[{n}] {each}" for n, each in enumerate(bound)]
