"""Keeps the name under which `collective.ops.key_hashing` was known first."""

from collective.ops.key_hashing import of_strings, owners, owners_np

__all__ = ["of_strings", "owners", "owners_np"]
