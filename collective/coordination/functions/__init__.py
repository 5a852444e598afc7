"""Lets ranks carry out the calls of TensorFlow's functions together."""
