"""Prints the installed packages that the given requirements do not need, one a line.

    python unneeded_packages.py 'collective-strategy[data]' horovod pip

Set-up installs everything that builds and tests this package as well. An image trains only: it
leaves out what this prints. Requirements of the package itself, which is not installed yet, are
read from pyproject.toml in the current folder.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

try:
    import tomllib
except ImportError:  # before Python 3.11
    import tomli as tomllib


def main(arguments: list[str]) -> int:
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    requirements = requirements_of_packages()
    project, project_requirements = requirements_of_project(Path("pyproject.toml"))
    installed = set(requirements)
    requirements[project] = project_requirements
    needed = reached(requirements, [Requirement(text) for text in arguments])
    for name in sorted(installed - needed):
        print(name)
    return 0


def requirements_of_packages() -> dict[str, list[Requirement]]:
    """Reads the requirements of every installed package, by its name."""
    return {
        canonicalize_name(package.metadata["Name"]): [
            Requirement(text) for text in package.requires or ()
        ]
        for package in importlib.metadata.distributions()
    }


def requirements_of_project(file: Path) -> tuple[str, list[Requirement]]:
    """Reads the name and the requirements of a project that is not installed.

    Requirements of an extra get the marker that they have in an installed package's metadata.
    """
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    for extra, texts in project["optional-dependencies"].items():
        for requirement in map(Requirement, texts):
            condition = f"({requirement.marker}) and " if requirement.marker else ""
            requirement.marker = Marker(f'{condition}extra == "{extra}"')
            requirements.append(requirement)
    return canonicalize_name(project["name"]), requirements


def reached(requirements: dict[str, list[Requirement]], roots: list[Requirement]) -> set[str]:
    """Returns the names of the packages that the roots need, and theirs, and so on.

    Raises:
        KeyError: a root is not installed.
    """
    for root in roots:
        if canonicalize_name(root.name) not in requirements:
            raise KeyError(f"{root.name} is not installed")
    names: set[str] = set()
    seen: set[tuple[str, str]] = set()  # packages with one of the extras asked for, or with ""
    pending = list(roots)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        names.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for further in requirements.get(name, ()):
                if further.marker is None or further.marker.evaluate({"extra": extra}):
                    pending.append(further)
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
