"""Draws the pictures of docs/how-fast.md from the tables of benchmarks/RESULTS.md.

python docs/speed_pictures.py      writes the pictures in docs/pictures
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
PICTURES = ROOT / "docs" / "pictures"

# In pixels: the picture, the names of groups, the values after bars, a bar, between groups.
WIDTH, LABELS, VALUES, BAR, GAP = 720, 230, 80, 20, 16
COLOURS = ("first", "second", "third")
STYLE = """
    svg { --paper: #ffffff; --ink: #1f2933; --first: #2f7fb8; --second: #c97a12;
          --third: #aab5bf; }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #14181d; --ink: #e6eaee; --first: #62aee2;
            --second: #e8a448; --third: #5b6875; }
    }
    text { font: 14px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
           fill: var(--ink); dominant-baseline: middle; }
    .head { font-size: 16px; font-weight: 600; }
    .end { text-anchor: end; }
"""


@dataclass(frozen=True)
class Group:
    """Holds the bars of a group, all on one scale.

    Attributes:
        name: of what is measured.
        values: of each of the picture's bars, as the table has them.
    """

    name: str
    values: tuple[str, ...]


def table(text: str) -> list[list[str]]:
    """Returns the rows of the first table of RESULTS.md after a text."""
    _, found, rest = RESULTS.read_text(encoding="utf-8").partition(text)
    assert found, f"benchmarks/RESULTS.md has no {text!r}"
    lines = itertools.dropwhile(lambda line: not line.startswith("|"), rest.splitlines())
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.replace("*", "").strip() for cell in row.split("|")[1:-1]] for row in rows][2:]


def peers() -> str:
    """Draws the steps of collective, TorchRec and plain TensorFlow."""
    values = {row[0]: row[1:] for row in table("`hb` and TorchRec side by side")}
    names = ("collective, hb, ms", "TorchRec 1.8 + FBGEMM, table-wise, ms", "plain TensorFlow, ms")
    settings = [f"rows of {dim}, {ids}" for ids in ("1 id", "1-10 ids") for dim in (16, 128)]
    return drawn(
        "A training step of two CPU ranks, in milliseconds: shorter is better",
        ("collective", "TorchRec", "plain TensorFlow, half of the batch"),
        [
            Group(setting, tuple(values[name][k] for name in names))
            for k, setting in enumerate(settings)
        ],
    )


def ranks() -> str:
    """Draws the steps of one rank and of two."""
    return drawn(
        "A training step of one rank and of two, in milliseconds: shorter is better",
        ("one rank", "two ranks"),
        [
            Group(f"{samples} samples, {size} network", (one, two))
            for dim, hidden, samples, one, _, two, _ in table("## Small models")
            for size in [{"8": "tiny", "256": "larger"}[hidden]]
            if dim == "16"
        ],
    )


def drawn(title: str, names: Sequence[str], groups: Sequence[Group]) -> str:
    """Returns a picture of groups of bars; the longest bar of each group has the same length."""
    lines = [f'  <text class="head" x="16" y="26">{title}</text>']
    x = 16
    for name, colour in zip(names, COLOURS):
        lines.append(f'  <rect x="{x}" y="46" width="14" height="14" fill="var(--{colour})"/>')
        lines.append(f'  <text x="{x + 20}" y="54">{name}</text>')
        x += 60 + 8 * len(name)
    y = 80
    for group in groups:
        middle = y + BAR * len(group.values) / 2
        lines.append(f'  <text class="end" x="{LABELS - 12}" y="{middle:g}">{group.name}</text>')
        for value, colour in zip(group.values, COLOURS):
            length = (WIDTH - LABELS - VALUES) * float(value) / max(map(float, group.values))
            lines += [
                f'  <rect x="{LABELS}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}"'
                f' fill="var(--{colour})"/>',
                f'  <text x="{LABELS + length + 8:.1f}" y="{y + BAR / 2:g}">{value}</text>',
            ]
            y += BAR
        y += GAP
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img"
     aria-labelledby="title">
  <title id="title">{title}</title>
  <style>{STYLE}  </style>
  <rect width="{WIDTH}" height="{y}" rx="8" fill="var(--paper)"/>
{chr(10).join(lines)}
</svg>
"""


PICTURED = {"speed-peers.svg": peers, "speed-ranks.svg": ranks}


def main() -> None:
    for name, draw in PICTURED.items():
        (PICTURES / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
