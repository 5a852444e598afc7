"""Has the ways in which Horovod sends tensors."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf


class NoneCompressor:
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Returns the tensor."""
        return tensor


class FP16Compressor:
    """Sends tensors of floating-point numbers as float16."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor as it is sent, and its type."""
        is_floating = tensor.dtype.is_floating
        return (tf.cast(tensor, tf.float16) if is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, context: Any) -> Any:
        """Returns the tensor in the type that it had."""
        return tf.cast(tensor, context) if context.is_floating else tensor


class Compression:
    """Names how tensors are sent."""

    none, fp16 = NoneCompressor, FP16Compressor
