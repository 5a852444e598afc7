"""Draws the memory of ranks: a bar for each rank, a piece of it for each table."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from collective.ops.counting import counted
from collective.plan.forecast.text import title
from collective.plan.formatting import in_bytes, shortened
from collective.planner.choices import Choice
from collective.planner.search import Forecast
from collective.planner.step_model import StepModel
from collective.planner.workload import owner_of

MOST_BARS, MOST_NAMED = 32, 12
EVERYWHERE = " on every rank"
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 760, 300, 70, 50, 18
# Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008), twice.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")


def svg(forecast: Forecast) -> str:
    """Returns the text of an SVG file: ranks from left to right, bytes upwards.

    Replicated tables are hatched; a table that one rank has whole is in its bar alone. Tables
    beyond the `MOST_NAMED` largest are one piece, as are buffers and the network. Of more than
    `MOST_BARS` ranks the fullest are drawn.
    """
    ranks = _fullest(forecast)
    pieces = _pieces(forecast, ranks)
    bars = len(ranks)
    highest = max(forecast.machines.device.memory.value, forecast.bytes)
    scale, step = HEIGHT / highest, WIDTH / bars
    bottom = TOP + HEIGHT
    out: list[str] = []
    for bar, rank in enumerate(ranks):
        top = float(bottom)
        for number, (name, where, sizes) in enumerate(pieces):
            size = sizes[bar]
            if not size:
                continue
            height = size * scale
            top -= height
            box = (
                f'x="{LEFT + bar * step:.2f}" y="{top:.2f}" width="{0.86 * step:.2f}" '
                f'height="{height:.2f}"'
            )
            what = escape(f"rank {rank}: {name}, {in_bytes(size)}")
            out.append(f'<rect {box} fill="{_colour(number)}"><title>{what}</title></rect>')
            if where == EVERYWHERE:
                out.append(f'<rect {box} fill="url(#hatched)"/>')
        out.append(_text(LEFT + (bar + 0.43) * step, bottom + 14, str(rank), "middle"))
    out += _limit(forecast.machines.room, "tables may have", bottom, scale)
    out += _limit(forecast.machines.device.memory.value, "memory", bottom, scale)
    legend_top = bottom + 44
    for number, (name, where, sizes) in enumerate(pieces):
        y = legend_top + number * LEGEND
        box = f'x="{LEFT}" y="{y - 10}" width="12" height="12"'
        out.append(f'<rect {box} fill="{_colour(number)}"/>')
        if where == EVERYWHERE:
            out.append(f'<rect {box} fill="url(#hatched)"/>')
        out.append(_text(LEFT + 20, y, f"{name}: {in_bytes(max(sizes))}{where}"))
    more = forecast.machines.ranks - bars
    note = f", and {counted(more, 'rank')} that have no more" if more else ""
    out.append(_text(LEFT, bottom + 28, f"ranks{note}"))
    height = legend_top + len(pieces) * LEGEND + 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 120} {height}" '
        'font-family="sans-serif" font-size="12">\n'
        f"<title>{escape(title(forecast))}</title>\n"
        '<defs><pattern id="hatched" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="2" height="6" fill="#ffffff" '
        'fill-opacity="0.55"/></pattern></defs>\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>'
    )
    heading = _text(LEFT, 22, title(forecast))
    return "\n".join([head, heading, *out, "</svg>\n"])


def _fullest(forecast: Forecast) -> list[int]:
    """Returns the ranks that are drawn, in their order."""
    every = range(forecast.machines.ranks)
    sizes = _sizes(forecast, forecast.choices, every)
    buffers = _buffers(forecast, every)
    fullest = sorted(every, key=lambda rank: (-sizes[rank] - buffers[rank], rank))
    return sorted(fullest[:MOST_BARS])


def _pieces(forecast: Forecast, ranks: Sequence[int]) -> list[tuple[str, str, list[float]]]:
    """Returns the name of each piece, a remark on where it is, and its bytes on each of `ranks`."""
    ordered = sorted(forecast.choices, key=lambda c: (-c.bytes, c.table.name))
    pieces = [
        (shortened(c.table.name, 48), _where(c), _sizes(forecast, [c], ranks))
        for c in ordered[:MOST_NAMED]
    ]
    others = ordered[MOST_NAMED:]
    if others:
        name = counted(len(others), "smaller table")
        pieces.append((name, "", _sizes(forecast, others, ranks)))
    return [*pieces, ("rows on their way, and the network", "", _buffers(forecast, ranks))]


def _where(choice: Choice) -> str:
    if choice.placement == "replicated":
        return EVERYWHERE
    owner = owner_of(choice.placement)
    return "" if owner is None else f" on rank {owner}"


def _sizes(forecast: Forecast, choices: Sequence[Choice], ranks: Sequence[int]) -> list[float]:
    """Returns the bytes of tables on each of `ranks`: row i is on rank i mod N."""
    total = forecast.machines.ranks
    sizes = [0.0] * len(ranks)
    for choice in choices:
        table, owner = choice.table, owner_of(choice.placement)
        for bar, rank in enumerate(ranks):
            if choice.placement == "rows":
                rows = len(range(rank, table.rows, total))
            else:
                rows = table.rows if owner in (None, rank) else 0
            sizes[bar] += rows * table.row_bytes
    return sizes


def _buffers(forecast: Forecast, ranks: Sequence[int]) -> list[float]:
    """Returns the bytes of rows on their way, and of the network, on each of `ranks`."""
    model = StepModel(forecast.workload, forecast.machines)
    more: dict[int, float] = {}
    for choice in forecast.choices:
        owner = owner_of(choice.placement)
        if owner is not None:
            of_answers = model.owner_bytes(choice.table) - choice.bytes
            more[owner] = more.get(owner, 0.0) + of_answers
    everywhere = model.buffer_bytes()
    return [everywhere + more.get(rank, 0.0) for rank in ranks]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _limit(count: float, what: str, bottom: float, scale: float) -> list[str]:
    """Draws the line of a number of bytes across all bars."""
    y = bottom - count * scale
    line = f'<line x1="{LEFT}" y1="{y:.2f}" x2="{LEFT + WIDTH}" y2="{y:.2f}"'
    return [
        f'{line} stroke="#333333" stroke-dasharray="4 3"/>',
        _text(LEFT - 6, y + 4, in_bytes(count), "end"),
        _text(LEFT + WIDTH + 4, y + 4, what),
    ]
