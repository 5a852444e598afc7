"""Holds `sitecustomize`, the only module that Python imports by itself when a rank starts."""
