"""Names the kernels of requests, which a compiled operation launches (`ops/native/gpu/ask.cc`)."""

from __future__ import annotations

from collective.ops.gpu.sources import Source

SOURCE = Source("ask.cu", ("fill_samples", "write_request", "write_positions"))
BAGS = Source(
    "ask_bags.cu",
    (
        "run_starts",
        "order_bags",
        "count_bags",
        "number_bags",
        "place_runs",
        "write_bags",
        "begin_bags",
        "list_bags",
    ),
)
