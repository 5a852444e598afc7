"""Builds well-formed HTML from text, which is escaped unless it is already markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

# Characters that neither HTML nor XML allows, though the name of a table may have them.
FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
VOID = frozenset({"meta", "br", "polyline", "line"})


class Markup(str):
    """Marks text that is already HTML, and isn't escaped again."""


def escape(text: object) -> Markup:
    """Returns `text` as HTML that shows it."""
    return Markup(html.escape(FORBIDDEN.sub("\ufffd", str(text))))


def join(content: Any) -> Markup:
    """Returns content as one piece of HTML.

    Args:
        content: text, markup, numbers, None for nothing, or any of these in lists.
    """
    if content is None:
        return Markup("")
    if isinstance(content, Markup):
        return content
    if isinstance(content, Iterable) and not isinstance(content, str):
        return Markup("".join(join(each) for each in content))
    return escape(content)


def element(name: str, /, *content: Any, **attributes: Any) -> Markup:
    """Returns an element.

    Args:
        name: its tag.
        content: see `join`.
        attributes: `class_` means class, `data_x` means data-x; None omits an attribute.
    """
    written = ""
    for key, value in attributes.items():
        if value is not None:
            written += f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
    if name in VOID:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(content)}</{name}>")
