"""Computes a rank's work before and after an exchange of keys and rows."""
