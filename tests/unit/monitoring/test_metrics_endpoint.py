"""Where metrics are served, and what a text without a job in it says."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from collective.coordination import milestones
from collective.job import metrics_address
from collective.job.metrics_address import MetricsAddress
from collective.monitoring import job_metrics, metrics_endpoint
from collective.monitoring.job_metrics import JobMetrics
from collective.ops.communication import collectives
from collective.profiling.breakdown import StepTimes, combine

collectives.init()


@pytest.mark.parametrize(
    "text, address",
    [
        ("9400", MetricsAddress("", 9400)),
        (" 0", MetricsAddress("", 0)),
        ("127.0.0.1:9400", MetricsAddress("127.0.0.1", 9400)),
        ("h1:65535", MetricsAddress("h1", 65535)),
        ("[::1]:9400", MetricsAddress("::1", 9400)),
    ],
)
def test_addresses(text, address):
    assert metrics_address.parse(text) == address


@pytest.mark.parametrize("text", ["", "x", "-1", "65536", "h1", "h1:", "9400:h1", "²", "1.5"])
def test_what_is_no_port(text):
    with pytest.raises(ValueError, match="is no port: give a number from 0 to 65535"):
        metrics_address.parse(text)


def test_an_address_of_ipv6_needs_brackets():
    with pytest.raises(ValueError, match=r"into brackets, like \[::1\]:9400"):
        metrics_address.parse("::1:9400")


@pytest.fixture
def fresh(monkeypatch):
    monkeypatch.setattr(metrics_endpoint, "_served", {})
    monkeypatch.setattr(job_metrics, "_metrics", {})


def test_a_port_that_is_taken(fresh, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv(metrics_address.VARIABLE, text)
        message = f"rank 0 can't serve metrics at '{text}'.*give --metrics-port"
        for _ in range(2):  # it isn't taken for served
            with pytest.raises(OSError, match=message):
                metrics_endpoint.start()


def test_a_variable_without_a_port(fresh, monkeypatch):
    monkeypatch.setenv(metrics_address.VARIABLE, "grafana")
    with pytest.raises(ValueError, match="COLLECTIVE_METRICS_PORT='grafana' is no port"):
        metrics_endpoint.start()


def text_of(metrics):
    registry = CollectorRegistry()
    registry.register(metrics_endpoint.JobCollector(metrics))
    text = generate_latest(registry).decode()
    return {line.rpartition(" ")[0]: line for line in text.splitlines() if line[0] != "#"}


def test_before_training(monkeypatch):
    """Nothing is said of what isn't known: no loss of 0, no rate of 0."""
    monkeypatch.setenv("COLLECTIVE_RESTART_COUNT", "2")
    monkeypatch.setattr(milestones, "_posters", {})  # Other tests of this process may have saved.
    lines = text_of(JobMetrics())
    assert lines["collective_restarts_total"] == "collective_restarts_total 2.0"
    assert lines["collective_samples_total"] == "collective_samples_total 0.0"
    assert not any("loss" in name or "seconds" in name for name in lines)


def test_two_ranks_with_typed_out_times():
    """Rank 0 computes for 6 ms and waits for rank 1, which computes for 8, in the exchange."""
    keys = "collective.group_0.keys"
    slow = StepTimes(9, 10.0, {"dense": 8.0, keys: 2.0}, {keys: 2.0}, {keys: 40}, samples=4)
    fast = StepTimes(9, 10.0, {"dense": 6.0, keys: 4.0}, {keys: 4.0}, {keys: 24}, samples=4)
    slow.asked["t"], fast.asked["t"] = 9, 3
    metrics = JobMetrics()
    metrics.static_rows = {"t": 7}
    metrics.measured(combine([[fast], [slow]]), steps=9, rate=100.0)
    metrics.evaluated("test", {"auc": 0.5, "global_step": 3, "summary": b"1", "text": "2"})
    lines = text_of(metrics)
    expected = {
        "collective_samples_total": 72.0,  # 9 steps of 8
        "collective_samples_per_second": 800.0,
        "collective_step_seconds": 0.01,
        'collective_phase_seconds{phase="dense"}': 0.007,
        'collective_phase_seconds{phase="keys"}': 0.002,
        'collective_phase_seconds{phase="waiting for others"}': 0.001,
        'collective_exchanged_bytes{phase="keys"}': 64.0,
        'collective_table_rows{table="t"}': 7.0,
        'collective_table_keys_max_by_mean{table="t"}': 1.5,
        'collective_metric{evaluation="test",metric="auc"}': 0.5,
        'collective_metric{evaluation="test",metric="global_step"}': 3.0,
    }
    for name, value in expected.items():
        assert float(lines[name].rpartition(" ")[2]) == pytest.approx(value), name
    assert not any("summary" in name or "text" in name for name in lines)


def test_where_the_size_of_a_step_is_told_it_isn_t_counted():
    metrics = JobMetrics()
    metrics.global_batch = 12
    metrics.measured(combine([[StepTimes(3, 1.0, samples=36)]]), steps=3, rate=2.0)
    assert (metrics.samples, metrics.samples_per_s) == (36, 24.0)


def test_the_board_and_the_page_name_what_is_served():
    """Each metric is on Grafana's board, and in the page's table; nothing else is."""
    metrics = JobMetrics()
    metrics.loss = 0.5
    metrics.measured(combine([[StepTimes(9, 1.0, samples=1)]]), steps=9, rate=1.0)
    registry = CollectorRegistry()
    registry.register(metrics_endpoint.JobCollector(metrics))
    poster = milestones.poster()
    poster.last_save = 3, 1.0
    served = set(re.findall(r"^# TYPE (\w+)", generate_latest(registry).decode(), re.M))
    poster.last_save = None
    guides = Path(__file__).parents[3] / "docs" / "guides"
    board = json.loads((guides / "grafana.json").read_text(encoding="utf-8"))
    expressions = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    on_board = {
        name for e in expressions for name in re.findall(r"\b(?:collective|process)_\w+", e)
    }
    assert on_board - {"process_resident_memory_bytes"} == served
    page = (guides / "metrics.md").read_text(encoding="utf-8")
    table = page.partition("| metric | what it is |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(collective_\w+)", table)) == served
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) and board["uid"] and board["schemaVersion"]
