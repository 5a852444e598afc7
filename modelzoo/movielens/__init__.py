"""Predicts which movies a user gives at least four stars."""
