"""Writes manifests as YAML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = Mapping[str, Any]


class _Literal(str):
    """Is written in double quotes, whatever it looks like."""


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Writes what is the same twice out twice: anchors are hard to edit."""
        return True


# The readers of Kubernetes and compose take more for numbers and booleans than PyYAML does, as 1e3,
# 0o17 and y: whatever begins like one of these is quoted.
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
    """Returns the documents after a comment.

    Args:
      comment: its lines.
      documents: mappings, whose order is kept.
    """
    parts = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
        for document in documents
    ]
    return "".join(f"# {line}\n" for line in comment) + "---\n".join(parts)


def literal(text: str) -> str:
    """Returns a text that Kubernetes and compose take for this one.

    They would put variables in the place of $(...), and take 1e3 for a number.
    """
    return _Literal(text.replace("$", "$$"))
