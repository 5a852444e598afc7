"""Reads values from the benchmarks' command lines, as types for argparse."""

from __future__ import annotations

import argparse
from pathlib import Path


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def counts(text: str) -> list[int]:
    """Reads counts with commas between them, such as 1,2."""
    return [count(part) for part in text.split(",")]


def span(text: str) -> tuple[int, int]:
    """Reads a count, or two with a hyphen between them, such as 1-10."""
    low, _, high = text.partition("-")
    if not 1 <= int(low) <= int(high or low):
        raise argparse.ArgumentTypeError(
            f"must be a number from 1, or two such as 1-10, not {text}"
        )
    return int(low), int(high or low)


def checkout(text: str) -> Path:
    """Reads the folder of a checkout of the library."""
    path = Path(text).resolve()
    if not (path / "collective" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} has no collective/__init__.py")
    return path


def policy_option(text: str) -> tuple[str, float]:
    """Reads an option of a `collective.TablePolicy`, 'steps_to_live=1000', say."""
    name, _, number = text.partition("=")
    try:
        return name, float(number) if "." in number else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't OPTION=NUMBER") from None
