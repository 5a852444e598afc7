"""Turns a forecast into plain values, for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

from collective.planner.search import Forecast

FORMAT = 1


def values_of(forecast: Forecast) -> dict[str, Any]:
    """Returns dictionaries, lists and plain values: seconds, bytes, and where figures come from."""
    machines = forecast.machines
    return {
        "format": FORMAT,
        "batch": forecast.workload.batch,
        "devices": {
            "name": machines.device.name,
            "ranks": machines.ranks,
            "hosts": machines.hosts,
            "figures": {
                name: dataclasses.asdict(figure)
                for name, figure in machines.device.figures().items()
            },
        },
        "step_seconds": forecast.parts.seconds,
        "parts": dataclasses.asdict(forecast.parts),
        "by_rows_seconds": forecast.by_rows,
        "bytes": forecast.bytes,
        "bytes_allowed": machines.room,
        "tables": {
            choice.table.name: {
                "placement": choice.placement,
                "bytes": choice.bytes,
                "seconds": choice.parts.seconds,
                "parts": dataclasses.asdict(choice.parts),
                "other": choice.other,
                "other_costs_seconds": choice.other_costs,
                "why": choice.why,
                "distinct": "assumed" if choice.table.distinct is None else "given",
            }
            for choice in forecast.choices
        },
    }
