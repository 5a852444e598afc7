"""Computes what a rank does around an exchange of keys and rows."""
