"""Checks on GPUs what binds the kernels to TensorFlow: exchanges, updates, tables that grow."""
