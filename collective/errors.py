"""Defines the errors of this library that TensorFlow has no name for."""


class RankError(RuntimeError):
    """Tells that another rank failed, or that the ranks don't do the same.

    The message says what each rank did. It is raised on every rank, before anything of the run in
    question was exchanged or applied.
    """


class ReplicaError(RuntimeError):
    """Tells that replicated variables are not equal on all ranks any more (`scope(check=…)`).

    It is raised on every rank, after the run.
    """


class TableError(TypeError):
    """Tells that a use of a table would have shown one rank's shard as if it were the whole table.

    The message names the table and the way to do it.
    """


class Preempted(SystemExit):
    """Tells that all ranks were told to stop, and have completed the same step.

    The first run in a session that would train or take data afterwards raises it, on every rank
    alike. A `MonitoredSession` first ends as if out of data, so that its hooks save a last
    checkpoint. If nobody catches it the process exits with `code`.

    Args:
        code: the exit code: 143, as for a process that TERM ends; 130 after Ctrl-C.
    """

    def __init__(self, code: int = 143):
        super().__init__(code)
