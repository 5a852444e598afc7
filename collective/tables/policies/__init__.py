"""Decides which keys of a dynamic table get rows, and which rows leave it."""
