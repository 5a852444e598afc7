"""Reads the launcher's command line and environment, and refuses what can't be used."""
