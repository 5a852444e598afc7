"""Names the kernel that finds where the bags of a message begin, which compiled operations launch
(`ops/native/gpu/bags.h`).
"""

from __future__ import annotations

from collective.ops.gpu.sources import Source

SOURCE = Source("bags.cu", ("bag_offsets",))
