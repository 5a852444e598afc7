"""Moves the rows of tables between sessions and checkpoints."""
