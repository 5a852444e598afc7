"""Runs training where another framework starts the processes."""
