"""Floating-point operations of a trainer's passes."""

from __future__ import annotations

from sluice.config.derived import adapts, is_bypassed, uses_reference
from sluice.config.memory.layouts import training_layout
from sluice.config.memory.shape import ModelShape
from sluice.config.run import RunConfig
from sluice.config.sources import responses_per_step

MEAN_RESPONSE = 0.5
"""Mean length of a response over the longest: unknown before a run."""
_FORWARD = 1 / 3
"""Of a forward and a backward pass, the forward pass."""
_ADAPTERS = 2 / 3
"""Of both, without the gradients of frozen weights."""


def group_flops(config: RunConfig, shape: ModelShape) -> float:
    """Return the operations of all passes over one group: a prompt once, and its responses.

    Each epoch has a forward and a backward pass, which computes recomputed layers again. Passes
    without gradients compute the reference's logprobs, and old ones of all mini-batches but the
    first, unless the behavior policy's are taken. Critic and images do not count. Of several
    sources it is the mean group of a batch.
    """
    data, actor = config.data, config.actor_rollout_ref.actor
    n, prompt = responses_per_step(config) / data.train_batch_size, data.max_prompt_length
    response = data.max_response_length * MEAN_RESPONSE
    tokens = prompt + n * response
    pairs = _causal(prompt) + n * (response * prompt + _causal(response))
    both = shape.training_flops(tokens, n * response, pairs)
    update = both * (_ADAPTERS if adapts(config.actor_rollout_ref.model) else 1)
    layout = training_layout(config)
    again = layout.recomputed_of(shape.layers) / shape.layers
    update += again * shape.training_flops(tokens, 0, pairs) * _FORWARD
    old = 0.0
    if not (actor.use_rollout_log_probs or is_bypassed(config)):
        old = max(0.0, 1 - actor.ppo_mini_batch_size / data.train_batch_size)
    return actor.ppo_epochs * update + (old + uses_reference(config)) * both * _FORWARD


def _causal(tokens: float) -> float:
    return tokens * (tokens + 1) / 2
