"""The errors of this library that TensorFlow has no name for."""


class RankError(RuntimeError):
    """Another rank failed, or the ranks don't do the same; what each did is in the message.

    Raised on every rank, before anything of the run in question was exchanged or applied.
    """


class ReplicaError(RuntimeError):
    """Replicated variables are not equal on all ranks any more (`scope(check=…)`); raised on every
    rank, after the run.
    """


class TableError(TypeError):
    """A table was used in a way that would have shown one rank's shard as if it were the whole
    table.
    """
