"""Changes TensorFlow inside `scope()`: its functions, sessions and complete graphs."""
