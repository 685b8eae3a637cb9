"""The text of a continued sample goes on where the caller's ends, also within a character."""

from __future__ import annotations

import numpy as np
import pytest

from services.rollout.engines.protocol import (
    GenerationRequest,
    PartialSample,
    SampleChunk,
    UnsentTokens,
)
from services.rollout.generation import GenerationEvent, GenerationRunner, StreamOptions
from sluice.types import FinishReason, Rollout, SamplingParams, TokenIds, VersionSpan

TEXT = "aé€😀b"


class Utf8:
    """Each token is a byte of UTF-8."""

    def decode(self, token_ids: TokenIds) -> str:
        return bytes(token_ids.tolist()).decode("utf-8", errors="replace")


class ByteEngine:
    """Generates the bytes of `TEXT`, one a chunk."""

    accounting = UnsentTokens()

    async def generate(self, request: GenerationRequest, **_: object):  # type: ignore[no-untyped-def]  # noqa: ANN201
        data = TEXT.encode()
        start = request.partials[0].token_ids.size if request.partials else 0
        for place in range(start, len(data)):
            reason = FinishReason.STOP if place + 1 == len(data) else None
            ids = np.array([data[place]], np.uint32)
            yield (SampleChunk(0, ids, np.zeros(1, np.float32), 0, reason),)


@pytest.mark.parametrize("cut", range(1, len(TEXT.encode())))
async def test_the_texts_before_and_after_the_cut_add_up(cut: int) -> None:
    data = np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint32)[:cut]
    zeros = np.zeros(cut, np.float32)
    partial = Rollout(0, data, zeros, (VersionSpan(0, 0, cut),), FinishReason.ABORTED, "")
    before = TEXT.encode()[:cut].decode("utf-8", errors="ignore")  # whole characters came
    sampling = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=99, seed=0)
    prompt = np.arange(2, dtype=np.uint32)
    request = GenerationRequest("r", prompt, (0,), sampling, (PartialSample(0, partial.token_ids),))
    events: list[GenerationEvent] = []

    async def send(event: GenerationEvent) -> None:
        events.append(event)

    engine = ByteEngine()
    await GenerationRunner(engine, Utf8()).run(  # type: ignore[arg-type]
        request, [partial], StreamOptions(every_token=True), send
    )
    after = "".join(delta.text for event in events for delta in event.deltas)
    assert before + after == TEXT
