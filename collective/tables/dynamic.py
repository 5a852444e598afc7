"""Keeps the first name of `collective.tables.dynamic_table`."""

from collective.tables.dynamic_table import DynamicTable

__all__ = ["DynamicTable"]
