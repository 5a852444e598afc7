"""Errors in a rank's stderr: where they begin and end, and what of them a report shows."""

from __future__ import annotations

import textwrap
import traceback

import pytest

from collective.launch.output.error_excerpt import excerpt
from collective.launch.output.raised_error import errors_in, last_error, lines_without_frames


def lines_of(text):
    return textwrap.dedent(text).strip("\n").split("\n")


PLAIN = lines_of(
    """
    Traceback (most recent call last):
      File "train.py", line 12, in <module>
        main()
      File "train.py", line 9, in main
        session.run(step)
      File "/usr/lib/python3.11/site-packages/tensorflow/session.py", line 900, in run
        result = self._run(None)
                 ^^^^^^^^^^^^^^^
    ValueError: wrong
    """
)
# As TensorFlow writes it: the operation's stack before the message and after it.
OUT_OF_MEMORY = (
    lines_of(
        """
    Traceback (most recent call last):
      File "/site-packages/tensorflow/session.py", line 1401, in _do_call
        return fn(*args)
    tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{node lookup}} OOM
    \t [[{{node lookup}}]]

    During handling of the above exception, another exception occurred:

    Traceback (most recent call last):
      File "train.py", line 9, in <module>
        session.run(step)
      File "/site-packages/tensorflow/session.py", line 972, in run
        result = self._run(None, fetches)
    tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:

    Detected at node 'lookup' defined at (most recent call last):
      File "train.py", line 5, in <module>
      File "/site-packages/tensorflow/array_ops.py", line 5, in gather
    Node: 'lookup'
    OOM when allocating tensor with shape[9]
    \t [[{{node lookup}}]]
    Hint: If you want to see a list of allocated tensors when OOM happens, add it.

    Tables and their slots take 1,024 bytes on this rank: 'user' 1,024.

    Original stack trace for 'lookup':
      File "train.py", line 5, in <module>
    """
    )
    + [
        '  File "/site-packages/tensorflow/x.py", line 7, in call',
        "    return call()",
    ]
    * 30
)


def test_the_excerpt_begins_at_the_exceptions_own_line_and_has_no_stacks():
    shown = excerpt(OUT_OF_MEMORY, code=1)
    assert shown.place == "train.py, line 9, in <module>: session.run(step)"
    assert shown.lines == (
        "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:",
        "Detected at node 'lookup' defined at (most recent call last):",
        "  at train.py, line 5, in <module>",
        "OOM when allocating tensor with shape[9]",
        "\t [[{{node lookup}}]]",
        "Tables and their slots take 1,024 bytes on this rank: 'user' 1,024.",
    )


def test_tensorflows_own_errors():
    """A run that fails, with the operation's stack in its message, as Python prints it."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default(), tf.Session() as session:
        ids = tf.placeholder(tf.int32, [1])
        rows = tf.gather(tf.zeros([3, 2]), ids, name="rows")
        try:
            session.run(rows, {ids: [7]})
        except tf.errors.InvalidArgumentError as error:
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    lines = text.rstrip().split("\n")
    assert len(lines) > 40 and "Original stack trace" in text
    shown = excerpt(lines, code=1)
    assert shown.lines[0].endswith("InvalidArgumentError: Graph execution error:")
    assert any("indices[0] = 7 is not in [0, 3)" in line for line in shown.lines)
    assert len(shown.lines) < 10 and "site-packages" not in " ".join(shown.lines)
    assert shown.place.endswith("session.run(rows, {ids: [7]})") and __file__ in shown.place


def test_the_whole_error_is_one():
    (error,) = errors_in(["before", *OUT_OF_MEMORY])
    assert (error.first, error.end) == (1, 1 + len(OUT_OF_MEMORY))
    assert [line.partition(": ")[2] for line in error.chain] == [
        "{{node lookup}} OOM",
        "Graph execution error:",
    ]


def test_a_python_function_of_the_graph_is_quoted_in_the_message():
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 9, in <module>',
        "    session.run(step)",
        "UnknownError: ValueError: no",
        "Traceback (most recent call last):",
        "",
        '  File "/lib/python3.11/site-packages/tensorflow/script_ops.py", line 2, in __call__',
        "    ret = func(*args)",
        "",
        '  File "train.py", line 3, in read',
        "    raise ValueError('no')",
        "",
        "ValueError: no",
        "",
        "\t [[{{node PyFunc}}]]",
    ]
    assert excerpt(lines, code=1).lines == (
        "UnknownError: ValueError: no",
        "Traceback (most recent call last):",
        "  at train.py, line 3, in read: raise ValueError('no')",
        "ValueError: no",
        "\t [[{{node PyFunc}}]]",
    )


@pytest.mark.parametrize(
    "after",
    [
        ["Exception ignored in: <function f at 0x7f>", *PLAIN[:-1], "TypeError: late"],
        ["Exception in thread Thread-1:", *PLAIN[:-1], "OSError: elsewhere"],
        ["2026-11-23 01:37:42.479186: W tensorflow/core/x.cc:9] about the end"],
    ],
)
def test_the_cause_is_not_what_is_written_in_passing(after):
    error = last_error([*PLAIN, *after])
    assert error.chain == ("ValueError: wrong",) and not error.is_aside
    assert error.place == "train.py, line 9, in main: session.run(step)"
    assert excerpt([*PLAIN, *after], code=1).lines == ("ValueError: wrong",)


def test_a_progress_bar_may_stand_before_the_error():
    error = last_error([" 50%|###   | 5/10" + PLAIN[0], *PLAIN[1:]])
    assert error.chain == ("ValueError: wrong",)


def test_last_lines_are_shown_after_an_error_that_was_survived():
    """A program that logs an error, goes on and gives up says why in its last lines."""
    lines = [*PLAIN, "INFO:root:again", *(f"line {number}" for number in range(40)), "given up"]
    shown = excerpt(lines, code=1).lines
    assert len(shown) == 21
    assert shown[0] == "ValueError: wrong" and shown[-1] == "given up"
    assert "... (23 lines left out)" in shown


def test_who_is_killed_has_no_exception():
    shown = excerpt([*PLAIN, "going on"], code=-11)
    assert not shown.is_error and shown.lines[-1] == "going on"
    crash = ["Fatal Python error: Segmentation fault", "", "Current thread (most recent first):"]
    assert excerpt([*PLAIN, *crash], code=-11).lines == tuple(crash)


def test_an_error_without_its_own_line_is_none():
    assert list(errors_in(PLAIN[:5])) == []


def test_a_script_that_python_cannot_read():
    lines = ['  File "train.py", line 3', "    x = = 3", "        ^", "SyntaxError: invalid syntax"]
    assert list(lines_without_frames(lines)) == ["  at train.py, line 3: x = = 3", lines[-1]]


@pytest.mark.parametrize(
    "code, later, is_error",
    [(1, 50, True), (1, 51, False), (3, 1, False), (3, 0, True), (-9, 0, False)],
)
def test_an_error_is_the_end_only_if_little_follows(code, later, is_error):
    lines = [*PLAIN, *(f"step {number}" for number in range(later))]
    shown = excerpt(lines, code)
    assert (shown.is_error, bool(shown.place)) == (is_error, is_error)
    assert shown.lines[-1] == lines[-1]


def test_indented_lines_and_warnings_after_an_error_do_not_count():
    lines = [*PLAIN, *["train.py:3: UserWarning: careful", "  warnings.warn('careful')"] * 60]
    assert excerpt(lines, 1).lines[0] == "ValueError: wrong"


def test_the_last_lines_of_a_program_that_reports_its_errors_itself_have_no_stack():
    """The stack of an operation would fill them; the message stands before it."""
    assert "OOM when allocating tensor with shape[9]" in excerpt(OUT_OF_MEMORY, 3).lines


def lookup(features):
    return features["missing"]


def convert(number):
    return lookup({"id": number})


def test_an_error_in_code_that_tensorflow_has_copied_names_the_script():
    """AutoGraph's copies have a random name each, so that ranks never raised alike."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        try:
            tf.data.Dataset.range(3).map(convert)
        except KeyError:
            text = traceback.format_exc()
    assert "__autograph_generated_file" in text
    (error,) = errors_in(text.rstrip().split("\n"))
    assert error.place.endswith('in lookup: return features["missing"]')
    assert error.place.startswith(__file__)


def test_an_error_right_in_a_copy_has_the_place_of_the_call():
    lines = [*PLAIN[:-1], '  File "/tmp/__autograph_generated_file1x.py", line 9, in f', PLAIN[-1]]
    assert last_error(lines).place == last_error(PLAIN).place
