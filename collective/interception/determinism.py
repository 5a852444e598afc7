"""Makes two launches of a program on the same number of ranks give the same bits.

This is scope(deterministic=True). TensorFlow can be told that an operation must give the same
result for the same inputs: then its kernels add in a fixed order, and tf.data delivers in a fixed
order. The same setting (`collective.ops.communication.collectives.in_order`) makes sums over ranks
add in the order of the ranks. All other sums of this library have a fixed order anyway: a row's
gradients arrive in the order of the ranks and of their keys, and one thread adds them up.
"""

from __future__ import annotations

from collective.tensorflow_internals.graphs import config


class Determinism:
    """Tells TensorFlow as long as a scope wants it, unless the program has told it before."""

    def __init__(self) -> None:
        self._enabled_here = False

    def set(self, wanted: bool) -> None:
        """Tells TensorFlow that operations must be deterministic, or no longer need to be."""
        if wanted and not config.is_op_determinism_enabled():
            config.enable_op_determinism()
            self._enabled_here = True
        elif not wanted and self._enabled_here:
            config.disable_op_determinism()
            self._enabled_here = False
