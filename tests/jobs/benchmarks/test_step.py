"""Runs benchmarks/step.py at a tiny size: figures and counts are checked, nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
STEP = ROOT / "benchmarks" / "step.py"
sys.path.insert(0, str(STEP.parent))

import step  # noqa: E402
from training_step import report as step_report  # noqa: E402
from training_step import workload as step_workload  # noqa: E402
from training_step.workload import CRITEO_ROWS, Setting  # noqa: E402

from tests.jobs.hosts.network import why_not  # noqa: E402

TINY = "--tables 3 --dim 8 --batch 64 --steps 3 --warmup 1 --max-rows 500".split()


def call(*arguments: str, timeout: int = 250) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(STEP), *arguments],
        cwd="/",
        timeout=timeout,
        text=True,
        capture_output=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")},
    )


@pytest.mark.long
def test_fit_takes_the_steps_of_a_session():
    """The program ends with an error where the losses differ."""
    done = call(*TINY, "--keras", "--network", "dlrm", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    out = json.loads(done.stdout.splitlines()[-1])
    assert set(out["programs"]) == {"step", "plain", "keras", "plain_keras"}
    assert out["keras_ratio"] > 0 and out["keras_to_plain"] > 0
    refused = call(*TINY, "--keras", "--ids", "1-3")
    assert refused.returncode == 1 and "--keras takes one id a feature" in refused.stderr


@pytest.mark.long
def test_the_last_line_has_every_figure():
    done = call(*TINY, "--ids", "1-3", "--network", "dlrm", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    *lines, last = done.stdout.splitlines()
    out = json.loads(last)
    times = ("step_ms", "step_p90_ms", "plain_ms", "wire_ms", "replicated_ms")
    for name in (*times, "copying_ms", "samples_per_s", "peak_rss_mb"):
        assert out[name] > 0, name
    assert out["step_p90_ms"] >= out["step_ms"]
    limit_ms = out["plain_ms"] + out["wire_ms"]
    assert out["ratio"] == pytest.approx(out["step_ms"] / limit_ms, abs=2e-3)
    assert out["samples_per_s"] == pytest.approx(64e3 / out["step_ms"], rel=1e-3)
    assert any(line.startswith("step ÷ (plain + wire)") for line in lines)

    collectives = {name: program["collectives"] for name, program in out["programs"].items()}
    assert collectives["plain"] == {}
    assert collectives["wire"] == {
        "CollectiveSharedAllgather": 1,
        "CollectiveSharedAlltoall": 3,
        "CollectiveSharedAllreduce": 1,
    }
    # Values and indices of each table.
    assert collectives["replicated"]["HorovodAllgather"] == 2 * 3
    assert collectives["step"]["CollectiveSharedAlltoall"] >= 3
    assert collectives["step"]["CollectiveSharedAllreduce"] >= 1
    assert out["collectives_per_step"] == sum(collectives["step"].values())

    # The traced step uses batch 4 of each rank. A rank receives keys, rows, gradients, headers and
    # dense gradients.
    setting = Setting(tables=3, dim=8, batch=64, ids=(1, 3), network="dlrm", max_rows=500)
    traced = [list(step_workload.batches(setting, rank))[4] for rank in range(2)]
    distinct = 0.0
    for batch in traced:
        for ids, _ in step_workload.by_feature(setting, batch):
            distinct += len(np.unique(ids)) / 2
    # One more dense element is the gate's.
    needed = distinct * (8 + 2 * 4 * 8) + 2 * 7 * 8 + 4 * (setting.dense_parameters() + 1)
    assert out["wire_bytes_per_step"] == pytest.approx(needed, abs=1)
    assert out["bytes_per_step"] >= out["wire_bytes_per_step"]

    first = {name: program["losses"][0] for name, program in out["programs"].items()}
    assert first["step"] == pytest.approx(first["plain"], rel=1e-5) and first["step"] > 0.1


@pytest.mark.long
def test_two_checkouts_are_compared_in_one_run():
    done = call(*TINY, "--against", str(ROOT), "--repeat", "1", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (compared,) = json.loads(done.stdout.splitlines()[-1])["comparisons"]
    assert compared["dim"] == 8
    assert compared["ratio"] == pytest.approx(
        compared["step_ms"] / compared["against_ms"], abs=2e-3
    )


def test_checkouts_are_compared_at_two_dimensions_unless_one_is_given():
    def dims(*arguments: str) -> list[int]:
        return [setting.dim for setting in step.settings_of(step.parse(list(arguments)))]

    assert dims() == [16] and dims("--dim", "8") == [8]
    assert dims("--against", str(ROOT)) == [16, 128]
    assert dims("--against", str(ROOT), "--dim", "8") == [8]


def test_bad_arguments_are_refused_before_anything_starts():
    for option, value, word in (
        ("--tables", "0", "at least 1"),
        ("--ids", "5-2", "such as 1-10"),
        ("--backend", "ps", "sok"),
        ("--against", "/nowhere", "collective/__init__.py"),
    ):
        done = call(option, value, timeout=60)
        assert done.returncode == 2 and word in done.stderr, done.stderr


def test_nothing_is_left_when_it_is_told_to_stop(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, str(STEP), *TINY],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    end = time.monotonic() + 60
    while not list(tmp_path.glob("step-*/step.log")):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + 15
    assert not list(tmp_path.glob("step-*"))


def measured(times: list[float], losses: list[float]) -> dict:
    return {
        "times": times,
        "cpu_ms": 1.0,
        "losses": losses,
        "bytes": 8,
        "collectives": {"HorovodAlltoall": 3},
        "peak_rss_mb": times[0],
        "base_rss_mb": 1.0,
    }


def test_a_step_takes_as_long_as_its_slowest_rank():
    ranks = [measured([1, 9, 2], [1, 2]), measured([8, 1, 3], [3, 4])]
    summary = step_report.summary("step", ranks)
    assert summary["ms"] == 8  # the median of 8, 9 and 3
    assert summary["least_ms"] == 3
    assert summary["losses"] == [2, 3] and summary["peak_rss_mb"] == 8
    # The larger of the medians 2 and 3: copies of `plain` don't wait for each other.
    assert step_report.summary("plain", ranks)["ms"] == 3


def test_the_ratio_is_the_median_of_the_rounds():
    rounds = []
    for times in ((20, 8, 2), (90, 20, 10), (10, 10, 10)):
        round_ = {}
        for name, ms in zip(("step", "plain", "wire"), times):
            round_[name] = step_report.summary(name, [measured([ms], [1.0])])
        rounds.append(round_)
    figures = step_report.figures(Setting(), rounds, 0.0)
    assert figures["ratios"] == [2, 3, 0.5] and figures["ratio"] == 2
    assert figures["step_ms"] == 20 and figures["replicated_ms"] is None


def test_other_losses_than_replicated_tables_have_are_an_error():
    def check(losses: list[float], **scope: object) -> None:
        round_ = {"step": measured([1], losses), "replicated": measured([1], [0.5, 0.4])}
        step_report.check_losses(Setting(scope=scope), round_)

    check([0.5, 0.400001])
    check([0.5, 0.41], wire_dtype="float16")  # rounded on purpose
    with pytest.raises(SystemExit, match="step 1 is 0.410000 in `step`, but 0.400000"):
        check([0.5, 0.41])


def test_options_reach_scope_only_if_they_are_given():
    (default,) = step.settings_of(step.parse([]))
    assert default.scope == {} and default.input == "feed"
    options = "--grouping off --wire-dtype float16 --local-steps 4 --prefetch-keys"
    (setting,) = step.settings_of(step.parse(options.split()))
    assert setting.scope == {
        "grouping": False,
        "wire_dtype": "float16",
        "local_steps": 4,
        "prefetch_keys": True,
    }
    assert setting.input == "dataset"


@pytest.mark.parametrize("tables, samples", [(3, 4096), (26, 4096), (260, 410)])
def test_the_number_of_ids_stays_when_there_are_more_tables(tables: int, samples: int):
    setting = Setting(tables=tables)
    rows = setting.rows()
    assert setting.samples == samples and len(rows) == tables
    assert rows[:3] == ([1460, 583, 1_000_000] if tables <= 26 else [146, 100, 100_000])
    assert max(CRITEO_ROWS) > 1_000_000 and min(rows) >= 100


@pytest.mark.parametrize("backend", ["hb", "sok"])
@pytest.mark.parametrize("ids", [(1, 1), (1, 4)])
def test_traffic_is_what_counting_by_hand_gives(backend: str, ids: tuple[int, int]):
    setting = Setting(
        ranks=3, tables=4, dim=8, batch=90, ids=ids, max_rows=40, pool=2, backend=backend
    )
    for batch in step_workload.batches(setting, 1):
        words, rows = np.zeros(3, int), np.zeros(3, int)
        for ids_of_table, samples in step_workload.by_feature(setting, batch):
            for owner in range(3):
                owned = ids_of_table % 3 == owner
                distinct = len(set(ids_of_table[owned]))
                bags = len(set(samples[owned]))
                if backend == "sok" and ids != (1, 1):
                    words[owner] += owned.sum() + -(-bags // 2)
                    rows[owner] += bags
                else:
                    words[owner] += distinct
                    rows[owner] += distinct
        assert np.array_equal(step_workload.traffic(setting, batch), np.stack([words, rows], 1))


def test_batches_are_those_of_the_seed_and_within_their_tables():
    setting = Setting(tables=5, batch=60, ids=(2, 3), max_rows=300, pool=2)
    once, again = (list(step_workload.batches(setting, 0)) for _ in range(2))
    other = next(step_workload.batches(setting, 1))
    for a, b in zip(once, again):
        assert all(np.array_equal(a[name], b[name]) for name in step_workload.shapes(setting))
    assert not np.array_equal(once[0]["label"], other["label"])
    for rows, (ids, samples) in zip(setting.rows(), step_workload.by_feature(setting, once[0])):
        counts = np.bincount(samples, minlength=setting.samples)
        assert 0 <= ids.min() and ids.max() < rows and (np.diff(samples) >= 0).all()
        assert counts.min() >= 2 and counts.max() <= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feed", "dataset"])
@pytest.mark.parametrize("tables, ids", [(30, (1, 1)), (3, (1, 4))])
def test_the_model_computes_what_numpy_does(
    tmp_path: Path, kind: str, tables: int, ids: tuple[int, int]
):
    import contextlib

    import tensorflow.compat.v1 as tf
    from training_step import model as step_model

    setting = Setting(tables=tables, dim=8, batch=80, ids=ids, max_rows=50, pool=2, input=kind)
    step_workload.write(setting, tmp_path)
    arrays = step_workload.read(setting, tmp_path, 0)
    with tf.Graph().as_default():
        data, optimizer = step_model.Input(setting, arrays), step_model.optimizer(setting)
        loss = step_model.loss(setting, data.tensors, contextlib.nullcontext())
        optimizer.minimize(loss)
        with tf.Session(config=step_model.session_config(setting)) as session:
            step_model.initialize_whole(session, optimizer)
            data.start(session)
            # The third step has the first batch again.
            losses = [session.run(loss, data.feed(i)) for i in range(3)]
    generator = np.random.default_rng(7)
    weights = generator.uniform(-1.0, 1.0, [tables, 8]).astype(np.float32).astype(np.float64)
    for i, got in enumerate(losses):
        batch = arrays[i % 2]
        logits = np.zeros(setting.samples)
        for (_, samples), of_table in zip(step_workload.by_feature(setting, batch), weights):
            logits += np.bincount(samples, minlength=setting.samples) * 0.01 * of_table.sum()
        expected = np.mean(np.logaddexp(0, logits) - logits * batch["label"][:, 0])
        assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_hosts_send_what_their_ranks_want_once():
    """Ids of small tables are wanted by all ranks: half of them needn't travel."""
    if why_not():
        pytest.skip(f"no hosts of network namespaces: {why_not()}")
    tables = "--tables 8 --dim 32 --batch 8192 --max-rows 300 --steps 5 --warmup 2".split()
    done = call("--hosts", "2", "--ranks", "4", *tables, "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (round_,) = json.loads(done.stdout.splitlines()[-1])["rounds"]
    assert 0 < round_["hierarchical"]["sent_by_host"] < 0.7 * round_["flat"]["sent_by_host"]


def test_hosts_have_equal_numbers_of_ranks(capsys):
    with pytest.raises(SystemExit):
        step.parse(["--hosts", "2", "--ranks", "3"])
    assert "--ranks that are a multiple of it, not 3" in capsys.readouterr().err
