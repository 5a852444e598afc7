"""Writes manifests as YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

Document = Mapping[str, Any]


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Writes what is the same twice out twice: anchors are hard to edit."""
        return True


def yaml_text(comment: Sequence[str], *documents: Document) -> str:
    """Returns the documents behind a comment.

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
    """Escapes a text in which Kubernetes or compose would put variables in the place of $(...)."""
    return text.replace("$", "$$")
