"""Keeps replicated variables equal over ranks."""
