"""Names the kernel that writes rows in place, which a compiled operation launches
(`ops/native/gpu/write.cc`).
"""

from __future__ import annotations

from collective.ops.gpu.sources import Source

SOURCE = Source("write.cu", ("write_rows",))
