"""Keeps and moves rows of tables by compiled code."""
