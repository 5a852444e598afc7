"""Keeps and moves rows of tables with compiled code."""
