"""Weights that vLLM's own loader has read at its start, serving as a version."""

from __future__ import annotations

from pathlib import Path

from services.rollout.engines.vllm.engine import VllmEngine


async def serve_saved(engine: VllmEngine, _: Path, version: int) -> None:
    """Tells the adapter that they serve."""
    thread, core = engine._in_thread()
    await thread.call(core._client.tag_version(str(version)), "naming a version")
    core.version, core.digest = version, "saved"
