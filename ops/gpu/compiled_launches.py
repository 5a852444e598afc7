"""Names the kernels that only compiled operations launch (`ops/native/gpu/`)."""

from __future__ import annotations

from collective.ops.gpu.sources import Source

# Requests (`ask.cc`).
ASK = Source("ask.cu", ("fill_samples", "write_request", "write_positions"))
ASK_BAGS = Source(
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
# Where the bags of a message begin (`bags.h`).
BAGS = Source("bags.cu", ("bag_offsets",))
# Rows that are written in place (`write.cc`).
WRITE = Source("write.cu", ("write_rows",))
