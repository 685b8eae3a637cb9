"""The Python SDK: watch a run, generate with the policy in training, and submit prompts to it.

Requests and addresses come in. Samples, prompt events, scores and the run's state go out. Begin
with `AsyncClient` or `Client`; docs/clients.md shows them at work.
"""

from sluice.client.async_client import AsyncClient
from sluice.client.generation_types import (
    ChatWithImages,
    Continuation,
    GenerateOptions,
    Generation,
    GenerationEvent,
    GenerationStarted,
    Prompt,
    SampleDelta,
    SampleFinished,
    Sampling,
)
from sluice.client.run_address import RunAddress, address_of_run, credentials_from_environment
from sluice.client.scoring import ScoreItem
from sluice.client.submission import NewPrompt, PromptEvent
from sluice.client.sync_client import Client
from sluice.rpc.retries import RetryPolicy
from sluice.types import Answer, ChatMessage, PromptLogprobs, ScoredPrompt, Tool, ToolCall

__all__ = [
    "Answer",
    "AsyncClient",
    "ChatMessage",
    "ChatWithImages",
    "Client",
    "Continuation",
    "GenerateOptions",
    "Generation",
    "GenerationEvent",
    "GenerationStarted",
    "NewPrompt",
    "Prompt",
    "PromptEvent",
    "PromptLogprobs",
    "RetryPolicy",
    "RunAddress",
    "SampleDelta",
    "SampleFinished",
    "Sampling",
    "ScoreItem",
    "ScoredPrompt",
    "Tool",
    "ToolCall",
    "address_of_run",
    "credentials_from_environment",
]
