"""Keeps the name under which `collective.tables.dynamic_table` was known first."""

from collective.tables.dynamic_table import DynamicTable

__all__ = ["DynamicTable"]
