"""Checks on GPUs the binding of kernels to TensorFlow: exchanges, updates, tables that grow."""
