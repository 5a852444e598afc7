"""Writes manifests as YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = Mapping[str, Any]


class _Literal(str):
    """Is written in double quotes, whatever it contains."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Writes repeated values in full: anchors are hard to edit."""
        return True


# Kubernetes and compose read more texts as numbers and booleans than PyYAML does, such as 1e3, 0o17
# and y: texts that begin like one of these are quoted.
_Dumper.add_implicit_resolver(
    "",
    re.compile(r"([-+]?\.?[0-9][-+.:_0-9A-Fa-foxX]*|[yYnN])\Z"),
    list("-+.0123456789yYnN"),
)
_Dumper.add_representer(
    _Literal,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style='"'),
)


def yaml_text(comment: Sequence[str], *documents: Document) -> str:
    """Returns the documents as YAML after a comment.

    Args:
        comment: the comment's lines.
        documents: mappings, whose order is kept.
    """
    parts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
        for document in documents
    ]
    return "".join(f"# {line}\n" for line in comment) + "---\n".join(parts)


def literal(text: str) -> str:
    """Returns `text` escaped so that Kubernetes and compose read it unchanged.

    They would substitute variables for $(...), and read 1e3 as a number.
    """
    return _Literal(text.replace("$", "$$"))
