"""Restores checkpoints on all ranks, also into other models."""
