"""Reads checkpoints without ranks, and checks what they contain."""
