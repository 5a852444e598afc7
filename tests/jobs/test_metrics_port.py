"""A job serves its metrics from outside's view: while it trains, and again after a restart."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.jobs import pool

PROGRAM = Path(__file__).with_name("resumable_training.py")
ENDLESS = 0


class Output:
    """Collects what a job writes, and tells where it has said that its metrics are."""

    def __init__(self, process):
        self.lines, self._said = [], threading.Condition()
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, stream):
        for line in stream:
            with self._said:
                self.lines.append(line)
                self._said.notify_all()

    def addresses(self):
        # The report on a failure repeats a rank's last lines, indented.
        said = r"^(?:\[0\] )?collective: metrics are at (http\S+)"
        return re.findall(said, "".join(self.lines), re.M)

    def address(self, attempt):
        """Returns that of an attempt, from 0; waits for it."""
        with self._said:
            assert self._said.wait_for(lambda: len(self.addresses()) > attempt, 90), self.lines
            return self.addresses()[attempt]


def scrape(address):
    text = urllib.request.urlopen(address, timeout=20).read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def until(condition, address):
    """Scrapes until the numbers fulfil a condition; returns them."""
    for _ in range(600):
        found = scrape(address)
        if condition(found):
            return found
        threading.Event().wait(0.1)
    raise AssertionError(found)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_is_watched_through_a_restart(tmp_path, ranks):
    process = pool.start(
        *("-np", ranks, "--device", "cpu", "--metrics-port", "127.0.0.1:0"),
        *("--max-restarts", 1, "--restart-pause", 0.1),
        *(PROGRAM, tmp_path, ENDLESS),
    )
    output = Output(process)
    try:
        first = output.address(0)
        found = until(lambda found: found.get(("collective_samples_total",), 0) > 0, first)
        assert found[("collective_ranks",)] == ranks
        assert found[("collective_restarts_total",)] == 0
        # The tenth run was measured.
        assert found[("collective_samples_total",)] == 10 * 24
        assert found[("collective_table_rows", "static")] == 40
        until(lambda found: found[("collective_last_save_global_step",)] >= 12, first)
        os.kill(int((tmp_path / "pid.0").read_text()), signal.SIGKILL)
        again = output.address(1)
        found = until(lambda found: found[("collective_saves_total",)] > 0, again)
        assert found[("collective_restarts_total",)] == 1
        assert found[("collective_global_step",)] >= found[("collective_last_save_global_step",)]
        assert found[("collective_last_save_global_step",)] >= 12
        assert found[("collective_steps_total",)] < found[("collective_global_step",)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        print("".join(output.lines))
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(again, timeout=5)


@pytest.mark.timeout(120)
def test_a_port_that_is_taken_ends_the_job(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ("-np", 2, "--device", "cpu", "--metrics-port", port)
        done = pool.launch(*options, PROGRAM, tmp_path, 3)
    assert done.returncode == 1
    assert f"rank 0 can't serve metrics at '{port}'" in done.stdout
    assert "root cause: rank 0 of 2" in done.stdout


@pytest.mark.timeout(120)
def test_ranks_that_disagree_about_metrics_say_so(tmp_path):
    """Without the launcher's option, a script may set the variable, but on all ranks."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '0':\n"
        "    os.environ['COLLECTIVE_METRICS_PORT'] = '127.0.0.1:0'\n"
        f"sys.path.insert(0, {os.fspath(pool.ROOT)!r})\n"
        "from tests.jobs.resumable_training import main\n"
        f"main({os.fspath(tmp_path)!r}, 3, [])\n"
    )
    done = pool.launch("-np", 2, "--device", "cpu", script)
    assert done.returncode == 1 and "metrics (--metrics-port)" in done.stdout
