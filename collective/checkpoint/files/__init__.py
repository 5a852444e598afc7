"""Reads and writes the files of checkpoints, in TensorFlow's formats."""
