"""Saves and restores models that eager code made, in the checkpoints of sessions."""
