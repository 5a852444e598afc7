"""The build context: the files of the checkout that .dockerignore lets an image build see."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath


class BuildContext:
    """Reads .dockerignore of a folder. The last pattern that matches a path, or a folder above it,
    decides; one that begins with ! lets it in.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._patterns: list[tuple[bool, str, re.Pattern[str]]] = []
        for line in (root / ".dockerignore").read_text(encoding="utf-8").splitlines():
            pattern = line.strip()
            if pattern and not pattern.startswith("#"):
                allows = pattern.startswith("!")
                pattern = pattern.lstrip("!").strip("/")
                self._patterns.append((allows, pattern, re.compile(_expression(pattern))))

    def holds(self, path: str) -> bool:
        """Tells whether a path, relative to the root, is part of the context if it exists."""
        pure = PurePosixPath(path)
        places = [str(pure), *(str(parent) for parent in pure.parents if parent.name)]
        held = True
        for allows, _, expression in self._patterns:
            if any(expression.fullmatch(place) for place in places):
                held = allows
        return held

    def files(self, below: str = "") -> list[str]:
        """Lists the files and links of the context that lie at a path or below it."""
        start = self.root / below
        if start.is_symlink() or start.is_file():
            return [below] if self.holds(below) else []
        found = []
        for directory, folders, names in os.walk(start):
            inner = Path(directory).relative_to(self.root)
            links = [name for name in folders if (Path(directory) / name).is_symlink()]
            found += [str(inner / name) for name in (*names, *links)]
            folders[:] = [name for name in folders if self._may_hold(str(inner / name))]
        return sorted(path for path in found if self.holds(path))

    def _may_hold(self, folder: str) -> bool:
        """Tells whether anything in a folder can be part of the context."""
        return self.holds(folder) or any(
            allows and pattern.startswith(f"{folder}/") for allows, pattern, _ in self._patterns
        )


def _expression(pattern: str) -> str:
    """Translates a pattern of .dockerignore to a regular expression for a whole path."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]*\])", pattern)
    translations = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expression = ""
    for part in parts:
        is_class = part.startswith("[")
        expression += part if is_class else translations.get(part, re.escape(part))
    return expression
