"""What lets two engines of a test module share a GPU, and weights reach them from the CPU.

On the CPU neither changes anything.
"""

from __future__ import annotations

MEMORY: dict[str, object] = {"gpu_memory_utilization": 0.3}
BACKEND = "gloo"
