"""Lets two launches of a program on the same number of ranks give the same bits.

This is scope(deterministic=True). TensorFlow can be told that an operation must give the same
result for the same inputs: from then on its kernels add in one order, and tf.data delivers in one
order. The same mark (`collective.ops.communication.collectives.in_order`) makes sums over ranks add
in the order of the ranks. All other sums of this library have one order anyway: a row's gradients
come in the order of the ranks and of their keys, and one thread adds them up.
"""

from __future__ import annotations

from collective.tensorflow_internals.graphs import config


class Determinism:
    """Tells TensorFlow for as long as a scope wants it, unless the program has told it before."""

    def __init__(self) -> None:
        self._enabled_here = False

    def set(self, wanted: bool) -> None:
        """Tells TensorFlow that operations must be deterministic, or needn't be any more."""
        if wanted and not config.is_op_determinism_enabled():
            config.enable_op_determinism()
            self._enabled_here = True
        elif not wanted and self._enabled_here:
            config.disable_op_determinism()
            self._enabled_here = False
