"""Follows the ranks' output on its way to the user."""

from __future__ import annotations

import os
import select
import subprocess

import pytest

pytestmark = pytest.mark.timeout(60)

# The ranks write in turn: each waits for the file that the one before it leaves.
IN_TURN = """
    import os, sys, time
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    out, err = sys.stdout.buffer, sys.stderr.buffer

    def wait_for(name):
        end = time.monotonic() + 20
        while not os.path.exists(name):
            assert time.monotonic() < end, name
            time.sleep(0.01)

    def leave(name):
        open(name, "w").close()

    def write(data, to=out):
        to.write(data)
        to.flush()
"""


def by_rank(output):
    """Returns the lines of each rank, without their prefix."""
    lines = {}
    for line in output.split(b"\n"):
        if line:
            prefix, _, text = line.partition(b" ")
            lines.setdefault(prefix, []).append(text)
    return lines


def test_lines_carry_their_rank_and_streams_stay_apart(launch):
    script = launch.script(IN_TURN + "    write(b'a\\n\\nb\\n'); write(b'c\\n', err)")
    code, stdout, stderr = launch("-np", 3, script)
    assert code == 0
    assert by_rank(stdout) == {b"[%d]" % rank: [b"a", b"", b"b"] for rank in range(3)}
    assert by_rank(stderr) == {b"[%d]" % rank: [b"c"] for rank in range(3)}


def test_a_line_of_one_megabyte_arrives_whole(launch):
    script = launch.script(IN_TURN + "    write(b'%d' % rank * (1 << 20) + b'\\n')")
    code, stdout, _ = launch("-np", 2, script)
    assert code == 0
    assert sorted(stdout.split(b"\n")) == [
        b"",
        b"[0] " + b"0" * (1 << 20),
        b"[1] " + b"1" * (1 << 20),
    ]


def test_one_megabyte_without_an_end_gets_one(launch):
    script = launch.script(IN_TURN + "    write(b'%d' % rank * (1 << 20))")
    _, stdout, _ = launch("-np", 2, script)
    assert sorted(stdout.split(b"\n")) == [
        b"",
        b"[0] " + b"0" * (1 << 20),
        b"[1] " + b"1" * (1 << 20),
    ]


def test_bytes_that_are_not_utf8_pass_untouched(launch):
    everything = bytes(set(range(256)) - set(b"\r\n"))
    script = launch.script(IN_TURN + f"    write({everything + b'%c'!r} + b'\\n')")
    assert launch("-np", 2, "--tee", 1, script)[1] == b"[1] " + everything + b"%c\n"
    assert launch("-np", 1, script)[1] == everything + b"%c\n"


def test_progress_bars_keep_their_carriage_returns(launch):
    script = launch.script(
        IN_TURN + "    write(b'10%\\r'); write(b'20%\\r'); write(b'done\\r\\nnext\\n')"
    )
    assert launch("-np", 2, "--tee", 0, script)[1] == b"[0] 10%\r[0] 20%\r[0] done\r\n[0] next\n"


def test_a_carriage_return_and_its_newline_may_come_apart(launch):
    script = launch.script(IN_TURN + "    write(b'a\\r'); time.sleep(0.3); write(b'\\nb\\n')")
    assert launch("-np", 2, "--tee", 0, script)[1] == b"[0] a\r\n[0] b\n"


def test_no_two_ranks_share_a_line(launch):
    """Rank 0's unfinished line is shown after a while, and given an end before rank 1 writes."""
    script = launch.script(
        IN_TURN
        + """
    if rank == 0:
        write(b"half")
        wait_for("second")
        write(b" whole\\n")
    else:
        wait_for("shown")
        write(b"other\\n")
        leave("second")
    """
    )
    process = launch.start("-np", 2, script)
    assert os.read(process.stdout.fileno(), 100) == b"[0] half"
    launch.folder.joinpath("shown").touch()
    rest, stderr = process.communicate(timeout=20)
    assert (rest, stderr) == (b"\n[1] other\n[0]  whole\n", b"")


def test_a_single_rank_has_no_prefix_and_the_launchers_stdin(launch):
    script = launch.script(
        IN_TURN + "    write(b'name? '); write(input().encode()); write(b'no end', err)"
    )
    assert launch(script, stdin=b"me\n") == (0, b"name? me", b"no end")


def test_ranks_of_a_larger_job_have_an_empty_stdin(launch):
    script = launch.script(IN_TURN + "    write(b'%r\\n' % sys.stdin.read())")
    assert by_rank(launch("-np", 2, script, stdin=b"me\n")[1]) == {b"[0]": [b"''"], b"[1]": [b"''"]}


def test_logs_keep_the_bytes_and_tee_limits_what_is_shown(launch, tmp_path):
    script = launch.script(
        IN_TURN + "    write(b'out %d\\r\\xff' % rank); write(b'err %d\\n' % rank, err)"
    )
    code, stdout, stderr = launch("-np", 4, "--log-dir", "logs/here", "--tee", "0,2-3", script)
    assert code == 0
    assert sorted(by_rank(stderr)) == [b"[0]", b"[2]", b"[3]"]
    assert b"[1]" not in stdout
    for rank in range(4):
        folder = tmp_path / "logs" / "here" / f"rank.{rank}"
        assert folder.joinpath("stdout").read_bytes() == b"out %d\r\xff" % rank
        assert folder.joinpath("stderr").read_bytes() == b"err %d\n" % rank


def test_tee_none_still_tells_of_a_failure(launch):
    script = launch.script("import sys; print('hidden'); sys.exit('why it failed')")
    code, stdout, stderr = launch("-np", 2, "--tee", "none", script)
    assert (code, stdout) == (1, b"")
    assert b"why it failed" in stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reader_that_goes_away_ends_the_job(launch, ranks):
    """As in `collective launch ... | head -1`."""
    script = launch.script("while True: print('a line')")
    process = launch.start("-np", ranks, script)
    assert b"a line\n" in process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 141
    assert b"the output can't be written (Broken pipe)" in process.stderr.read()
    process.stderr.close()


def test_a_reader_that_does_not_read_does_not_delay_a_signal(launch):
    script = launch.script("while True: print('x' * 1000)")
    unread, full = os.pipe()
    try:
        process = launch.start("-np", 2, script, stdout=full)
        # A count of bytes would not do: a write that doesn't fit its page begins another one.
        launch.wait_until(lambda: not select.select([], [full], [], 0)[1], "the pipe full")
        process.terminate()
        assert process.wait(20) == 143
        process.stderr.close()
    finally:
        os.close(unread)
        os.close(full)


def test_closed_standard_streams(launch):
    script = launch.script("import sys; print('lost'); print('shown', file=sys.stderr)")
    command = f'exec "$@" -np 2 {script} <&- >&-'
    result = subprocess.run(
        ["sh", "-c", command, "sh", *launch.COMMAND],
        env=launch.environment,
        cwd=launch.folder,
        stderr=subprocess.PIPE,
        timeout=20,
    )
    assert result.returncode == 0
    assert by_rank(result.stderr) == {b"[0]": [b"shown"], b"[1]": [b"shown"]}


def test_a_process_that_keeps_a_pipe_open_does_not_hold_up_the_end(launch):
    """The grandchild holds stdout, ignores TERM and would sleep for a minute."""
    script = launch.script(
        """
        import signal, subprocess, sys
        sleeper = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print('up'); time.sleep(60)"
        )
        child = subprocess.Popen(
            [sys.executable, "-uc", sleeper], stdout=subprocess.PIPE, start_new_session=True
        )
        child.stdout.readline()
        print("done")
        """
    )
    assert launch("-np", 1, "--grace", "0.2", script, timeout=20)[:2] == (0, b"done\n")


def test_the_ranks_are_told_of_the_terminal(launch):
    """They hear its width less the prefix; a new line keeps another rank off a progress bar."""
    script = launch.script(
        IN_TURN
        + """
    if rank == 0:
        terminal, columns = os.environ["COLLECTIVE_TERMINAL"], os.environ["COLUMNS"]
        write(f"{terminal} {columns}".encode() + b"\\r")
        leave("bar")
    else:
        wait_for("bar")
        time.sleep(0.3)
        write(b"other\\n")
    """
    )
    reader, terminal = os.openpty()
    process = launch.start(
        "-np", 2, script, environment={"COLUMNS": "50"}, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(reader, 1000)
        except OSError:  # the other end is closed
            break
        shown += piece
    os.close(reader)
    assert process.wait(20) == 0
    first, _, rest = shown.partition(b"\r\n")  # a terminal makes "\\r\\n" of "\\n"
    assert first.startswith(b"collective launch: starting 2 ranks on ")
    assert rest == b"[0] 1 46\r\r\n[1] other\r\n"


def test_without_a_terminal_the_ranks_are_told_so(launch):
    script = launch.script(
        "import os; print(os.environ['COLLECTIVE_TERMINAL'], os.environ.get('COLUMNS'))"
    )
    assert launch(script)[1] == b"0 None\n"
