"""Replaces, inside scope(), functions of Horovod and Keras that scripts call."""
