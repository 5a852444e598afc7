"""Holds the parts that the example programs share."""
