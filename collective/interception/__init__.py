"""Changes TensorFlow inside `scope()`: its functions, sessions and finished graphs."""
