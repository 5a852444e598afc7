"""Defines the errors of this library that TensorFlow has no name for."""


class RankError(RuntimeError):
    """Is raised when another rank failed, or the ranks don't do the same.

    The message says what each rank did. It is raised on every rank, before anything of the run is
    exchanged or applied.
    """


class ReplicaError(RuntimeError):
    """Is raised when replicated variables are no longer equal on all ranks (`scope(check=…)`).

    It is raised on every rank, after the run.
    """


class TableError(TypeError):
    """Is raised when a use of a table would show one rank's shard as if it were the whole table.

    The message names the table and says what to do instead.
    """


class Preempted(SystemExit):
    """Is raised when all ranks were told to stop, and have completed the same step.

    The next run in a session that would train or take data raises it, on every rank. A
    `MonitoredSession` first ends as if out of data, so that its hooks save a last checkpoint.
    Eager code gets it from the next step: a call of a `tf.function` that trains or takes data, or
    a tape. A Keras `fit` first lets `collective.keras.callbacks.Checkpoint` save, and calls
    `on_preempted()` of callbacks that have it. If it isn't caught, the process exits with `code`.

    Args:
        code: the exit code: 143, as for a process that TERM ends; 130 after Ctrl-C.
    """

    def __init__(self, code: int = 143):
        super().__init__(code)
