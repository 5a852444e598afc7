"""Draws the memory of ranks: a bar for each rank, a piece of it for each table."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from collective.ops.counting import counted
from collective.plan.forecast.text import title
from collective.plan.formatting import in_bytes, shortened
from collective.planner.search import Choice, Forecast
from collective.planner.step_model import StepModel

MOST_BARS, MOST_NAMED = 32, 12
WIDTH, HEIGHT, LEFT, TOP, LEGEND = 760, 300, 70, 50, 18
# Colours that people with any kind of colour vision tell apart (Okabe and Ito, 2008), twice.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")


def svg(forecast: Forecast) -> str:
    """Returns the text of an SVG file: ranks from left to right, bytes upwards.

    Replicated tables are hatched. Tables beyond the `MOST_NAMED` largest are one piece, as are
    buffers and the network. Of more than `MOST_BARS` ranks the first ones are drawn: all ranks
    differ by a row of each table at most.
    """
    pieces = _pieces(forecast)
    bars = min(forecast.machines.ranks, MOST_BARS)
    highest = max(forecast.machines.device.memory.value, forecast.bytes)
    scale, step = HEIGHT / highest, WIDTH / bars
    bottom = TOP + HEIGHT
    out: list[str] = []
    for rank in range(bars):
        top = float(bottom)
        for number, (name, replicated, sizes) in enumerate(pieces):
            size = sizes[rank]
            height = size * scale
            top -= height
            box = (
                f'x="{LEFT + rank * step:.2f}" y="{top:.2f}" width="{0.86 * step:.2f}" '
                f'height="{height:.2f}"'
            )
            what = escape(f"rank {rank}: {name}, {in_bytes(size)}")
            out.append(f'<rect {box} fill="{_colour(number)}"><title>{what}</title></rect>')
            if replicated:
                out.append(f'<rect {box} fill="url(#hatched)"/>')
        out.append(_text(LEFT + (rank + 0.43) * step, bottom + 14, str(rank), "middle"))
    out += _limit(forecast.machines.room, "tables may have", bottom, scale)
    out += _limit(forecast.machines.device.memory.value, "memory", bottom, scale)
    legend_top = bottom + 44
    for number, (name, replicated, sizes) in enumerate(pieces):
        y = legend_top + number * LEGEND
        box = f'x="{LEFT}" y="{y - 10}" width="12" height="12"'
        out.append(f'<rect {box} fill="{_colour(number)}"/>')
        if replicated:
            out.append(f'<rect {box} fill="url(#hatched)"/>')
        kind = " on every rank" if replicated else ""
        out.append(_text(LEFT + 20, y, f"{name}: {in_bytes(sizes[0])}{kind}"))
    more = forecast.machines.ranks - bars
    note = f", and {counted(more, 'rank')} like them" if more else ""
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


def _pieces(forecast: Forecast) -> list[tuple[str, bool, list[float]]]:
    """Returns the name of each piece, whether its table is replicated, and its bytes by rank."""
    ranks = min(forecast.machines.ranks, MOST_BARS)
    ordered = sorted(forecast.choices, key=lambda c: (-c.bytes, c.table.name))
    pieces = [
        (shortened(c.table.name, 48), c.placement == "replicated", _sizes(forecast, [c], ranks))
        for c in ordered[:MOST_NAMED]
    ]
    others = ordered[MOST_NAMED:]
    if others:
        name = counted(len(others), "smaller table")
        pieces.append((name, False, _sizes(forecast, others, ranks)))
    buffers = StepModel(forecast.workload, forecast.machines).buffer_bytes()
    return [*pieces, ("rows on their way, and the network", False, [buffers] * ranks)]


def _sizes(forecast: Forecast, choices: Sequence[Choice], ranks: int) -> list[float]:
    """Returns the bytes of tables on each of the first ranks: row i is on rank i mod N."""
    total = forecast.machines.ranks
    sizes = [0.0] * ranks
    for choice in choices:
        table = choice.table
        for rank in range(ranks):
            if choice.placement == "replicated":
                rows = table.rows
            else:
                rows = len(range(rank, table.rows, total))
            sizes[rank] += rows * table.row_bytes
    return sizes


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
