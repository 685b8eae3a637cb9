"""A request inside the engine, and what it gets out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.rollout.engines.protocol import GenerationRequest, SampleChunk
from sluice.vision.image_prompts import ImagePrompt

__all__ = ["Delivery", "EngineRequest"]


@dataclass(slots=True, eq=False)
class EngineRequest:
    """A request in the engine; `remaining` samples have not ended.

    `due` is when tokens of unfinished samples are handed out next, in seconds of
    `time.perf_counter`: each `partial_interval_s` from the first step on; never if that is None.
    `images` are the prompt's, made ready for the model.
    """

    request: GenerationRequest
    every_token: bool
    remaining: int
    partial_interval_s: float | None = None
    due: float = math.inf
    images: ImagePrompt | None = None


@dataclass(slots=True, eq=False)
class Delivery:
    """What one ticket gets after a step."""

    engine_request: EngineRequest
    chunks: list[SampleChunk] = field(default_factory=list)
