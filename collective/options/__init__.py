"""Holds the options of scope(), embedding_scope() and estimator(): types, defaults and checks.

An options object is checked when it is made. Each option of scope() is declared once, in
`scopes.py`: its keyword in `CollectiveStrategy.scope` and its documentation there follow from that.
"""

from collective.options.scopes import EmbeddingOptions, ScopeOptions

__all__ = ["EmbeddingOptions", "ScopeOptions"]
