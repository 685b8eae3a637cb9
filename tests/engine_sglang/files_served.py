"""Serve weights that SGLang's own loader has read at its start."""

from __future__ import annotations

from pathlib import Path

from services.rollout.engines.sglang.engine import SglangEngine


async def serve_saved(engine: SglangEngine, _: Path, version: int) -> None:
    """Let the adapter learn that they serve."""
    thread, core = engine._in_thread()
    await thread.call(core.client.tag_version(version), "naming a version")
    core.version, core.digest = version, "saved"
