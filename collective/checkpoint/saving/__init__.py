"""Saves checkpoints on all ranks: savers, commits in the background, increments."""
