"""Keeps the rows of tables in memory and in files."""
