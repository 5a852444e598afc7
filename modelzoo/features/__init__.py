"""Holds programs that show single features."""
