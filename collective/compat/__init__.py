"""Provides the names of other frameworks, so that scripts written for them run unchanged."""
