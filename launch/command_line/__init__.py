"""Reads the launcher's command line and environment, and refuses invalid options."""
