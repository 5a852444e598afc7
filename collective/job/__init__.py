"""Describes a rank's job: its place, how ranks meet, and what they tell the launcher.

The launcher and the library both build on this package, which imports neither.
"""
