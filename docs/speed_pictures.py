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

# In pixels of a picture of WIDTH. A desk's screen shows it as SHOWN, a phone's a bit smaller.
WIDTH, SHOWN, MARGIN, VALUES, BAR, LINE = 440, 560, 12, 56, 18, 24
COLOURS = ("first", "second", "third")
STYLE = """
    svg { --paper: #ffffff; --ink: #1f2933; --first: #2f7fb8; --second: #c97a12;
          --third: #aab5bf; --quiet: #5b6875; }
    @media (prefers-color-scheme: dark) {
      svg { --paper: #14181d; --ink: #e6eaee; --first: #62aee2;
            --second: #e8a448; --third: #5b6875; --quiet: #9fabb7; }
    }
    text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
           fill: var(--ink); dominant-baseline: middle; }
    .head { font-size: 15px; font-weight: 600; }
    .quiet { fill: var(--quiet); }
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
        "A training step of two CPU ranks",
        ("collective", "TorchRec", "plain TensorFlow"),
        [
            Group(setting, tuple(values[name][k] for name in names))
            for k, setting in enumerate(settings)
        ],
    )


def ranks() -> str:
    """Draws the steps of one rank and of two."""
    return drawn(
        "A training step of one rank and of two",
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
    lines = [
        f'  <text class="head" x="{MARGIN}" y="20">{title}</text>',
        f'  <text class="quiet" x="{MARGIN}" y="42">milliseconds: shorter is better</text>',
    ]
    x = MARGIN
    for name, colour in zip(names, COLOURS):
        lines.append(f'  <rect x="{x}" y="58" width="12" height="12" fill="var(--{colour})"/>')
        lines.append(f'  <text x="{x + 18}" y="65">{name}</text>')
        x += 44 + 7 * len(name)
    y = 82
    for group in groups:
        lines.append(f'  <text x="{MARGIN}" y="{y + LINE / 2:g}">{group.name}</text>')
        y += LINE
        for value, colour in zip(group.values, COLOURS):
            length = (WIDTH - MARGIN - VALUES) * float(value) / max(map(float, group.values))
            lines += [
                f'  <rect x="{MARGIN}" y="{y + 2}" width="{length:.1f}" height="{BAR - 4}"'
                f' fill="var(--{colour})"/>',
                f'  <text x="{MARGIN + length + 6:.1f}" y="{y + BAR / 2:g}">{value}</text>',
            ]
            y += BAR
        y += LINE // 4
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}"
     width="{SHOWN}" height="{SHOWN * y // WIDTH}" role="img" aria-labelledby="title">
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
