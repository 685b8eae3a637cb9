"""Choose the fastest decoder whose logits match the model's.

Each candidate decodes a few tokens of random sequences under random weights, and its logits are
compared with the model's own forward pass. An architecture with an unusual detail thus costs speed,
never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from transformers import PreTrainedModel

from services.rollout.engines.embedded.decoder import DecodeBatch, Decoder
from services.rollout.engines.embedded.fused_decoder import FusedDecoder
from services.rollout.engines.embedded.generic_decoder import GenericDecoder, RecomputeDecoder
from sluice.errors import ConfigError
from sluice.vision.vision_shape import FAMILIES

logger = logging.getLogger(__name__)

_SEED = 20240229
_TOKENS, _STEPS = 12, 4
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}  # of the logits' norm

DecoderClass = Callable[[PreTrainedModel, int, int], Decoder]


def choose_decoder(
    model: PreTrainedModel,
    slots: int,
    max_model_len: int,
    candidates: tuple[DecoderClass, ...] = (FusedDecoder, GenericDecoder),
) -> Decoder:
    """Return the first of `candidates` that matches the model, else one that recomputes everything.

    The model's weights are arbitrary afterwards.

    Raises:
        ConfigError: the device has no memory for the slots; or none matches a model with images,
            which recomputation would read at each step.
    """
    # Candidates are in the order of their speed.
    _randomize_weights(model)
    trial = _Trial(model, min(_TOKENS, max_model_len), min(2, slots))
    for candidate in candidates:
        name = getattr(candidate, "__name__", str(candidate))
        decoder = None  # frees the memory of a failed candidate
        try:
            decoder = candidate(model, slots, max_model_len)
            error = trial.relative_error(decoder)
        except NotImplementedError as reason:
            logger.debug("%s does not cover this model: %s", name, reason)
            continue
        except torch.OutOfMemoryError:
            raise  # no reason to recompute everything
        # Code of an unknown model may fail in any of these ways; the next candidate may work.
        except (
            AttributeError,
            IndexError,
            KeyError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as reason:
            logger.info("%s fails on this model: %s", name, reason)
            continue
        if error <= _TOLERANCE[model.dtype]:
            logger.info("decoding with %s (relative error %.1e)", name, error)
            return decoder
        logger.info("%s differs from this model by %.1e and is not used", name, error)
    if model.config.model_type in FAMILIES:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name is 'torch', which has no cached decoding for this "
            f"{model.config.model_type} model; use vllm"
        )
    model.set_attn_implementation("eager")  # a candidate may have left its own attention
    logger.warning("no cached decoding for this model; every step recomputes whole sequences")
    return RecomputeDecoder(model)


def _randomize_weights(model: PreTrainedModel) -> None:
    """Set random weights, so that every part affects the logits: initial ones contain zeros and
    ones."""
    generator = torch.Generator(model.device).manual_seed(_SEED)
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
            else:
                noise = torch.empty_like(parameter).normal_(std=0.1, generator=generator)
                parameter.add_(noise)


class _Trial:
    """Random sequences and the model's own logits for them."""

    def __init__(self, model: PreTrainedModel, tokens: int, rows: int) -> None:
        model.set_attn_implementation("eager")
        vocab_size = model.config.get_text_config(decoder=True).vocab_size
        generator = np.random.default_rng(_SEED)
        self._history = generator.integers(0, vocab_size, (rows, tokens))
        token_ids = torch.from_numpy(self._history).to(model.device)
        with torch.inference_mode():
            self._logits = model(input_ids=token_ids, use_cache=False).logits.float()
        steps = min(_STEPS, tokens - 1)
        # Prompts of different lengths test padding and per-row positions.
        self._starts = np.array([tokens - steps, max(1, tokens - steps - 3)])[:rows]
        self._steps = steps

    def relative_error(self, decoder: Decoder) -> float:
        """Return |decoder's logits - model's| / |model's| over all steps; infinite for a nan."""
        rows = np.arange(len(self._starts))
        errors = []
        with torch.inference_mode():
            prompts = [
                tokens[:start] for tokens, start in zip(self._history, self._starts, strict=True)
            ]
            prefilled = decoder.prefill(prompts)
            decoder.insert(prefilled, rows, rows)
            # Compute the second halves again, after the kept first halves.
            halves = [
                decoder.keep(row, prompt[: prompt.size // 2])
                for row, prompt in enumerate(prompts)
                if prompt.size > 1
            ]
            prefixes = [prefix for prefix in halves if prefix is not None]
            if len(prefixes) == len(prompts):
                decoder.insert(decoder.extend(prefixes, prompts), rows, rows)
            for step in range(self._steps):
                positions = self._starts + step
                batch = DecodeBatch(
                    token_ids=self._history[rows, positions],
                    positions=positions,
                    length=int(positions.max()) + 1,
                    history=self._history,
                )
                expected = self._logits[rows, positions]
                difference = decoder.decode(batch).float() - expected
                errors.append(float(difference.norm() / expected.norm()))
        return max(errors) if np.isfinite(errors).all() else float("inf")
