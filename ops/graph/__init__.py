"""Reads, marks and changes TensorFlow's graphs."""
