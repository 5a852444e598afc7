"""Builds the site of the documentation: `make docs` writes build/docs/index.html.

    python docs/build.py [FOLDER]      another folder than build/docs; what is in it is removed

It needs no network. It fails where a public name lacks documentation (a module, class, method or
function without a docstring, or a parameter that the docstring doesn't name), where a link of a
page leads nowhere, or a page mentions a name, variable or target that doesn't exist.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

# Without a GPU TensorFlow's import says that it can't register CUDA's libraries.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "docs"
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import docs_api  # noqa: E402
import docs_checks  # noqa: E402
import docs_pages  # noqa: E402
import docs_site  # noqa: E402


def main(site: Path = SITE) -> None:
    modules = map(importlib.import_module, docs_pages.PUBLIC_MODULES)
    missing = [line for module in modules for line in docs_api.undocumented(module)]
    if missing:
        sys.exit("\n".join(["These public names are not documented:", *missing]))

    shutil.rmtree(site, ignore_errors=True)
    api = docs_api.pages()
    pages = docs_pages.read_all(ROOT, docs_api.places(api))
    problems = [*docs_pages.problems(ROOT, pages), *docs_checks.unknown_names(ROOT, pages)]
    if not problems:
        docs_site.write(site, ROOT, [*pages, *api])
        problems = docs_checks.broken_links(site)

    if problems:
        sys.exit("\n".join(["These pages are wrong:", *problems]))
    print(site / "index.html")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
