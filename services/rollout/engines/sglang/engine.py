"""SGLang behind the engine Protocol.

SGLang's client runs in the thread of the engine; SGLang's schedulers are processes, and
`sglang.scheduler` brings the sampler and the weights into them. This module is what the service's
event loop sees of them.

SGLang would resize images by its own rules and read the prompt's text again. It takes the patches
and positions that the trainer has too, with the token ids as they are.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass

import torch

from services.rollout.engines.protocol import GenerationRequest
from services.rollout.engines.sglang.client import installed_sglang
from services.rollout.engines.sglang.core import SglangCore
from services.rollout.engines.sglang.settings import SglangSettings, sglang_settings
from services.rollout.engines.vendor.engine import VendorEngine
from sluice.config.run import RunConfig
from sluice.errors import InvalidRequestError, MissingPackageError
from sluice.vision.image_prompts import ImagePrompt, ImagePromptReader


@dataclass(frozen=True, slots=True, eq=False)
class SglangImages:
    """Images of one prompt.

    Attributes:
        prompt: where its images are, and its positions.
        pixel_values: [patches, numbers a patch] float32, of all images.
    """

    prompt: ImagePrompt
    pixel_values: torch.Tensor

    def of(self, num_tokens: int) -> dict[str, object]:
        """Return SGLang's ``image_data`` for the prompt and what follows it, `num_tokens` in all.

        Image tokens behind the prompt are text.
        """
        offsets, place = [], 0
        for count in self.prompt.num_tokens.tolist():
            own = self.prompt.places[place : place + count]
            offsets.append((int(own[0]), int(own[-1])))
            place += count
        positions = self.prompt.positions
        return {
            "format": "processor_output",
            "pixel_values": self.pixel_values,
            "image_grid_thw": torch.from_numpy(self.prompt.grid_thw),
            "offsets": offsets,
            "mrope_positions": torch.from_numpy(positions.extended(num_tokens)),
            "mrope_position_delta": torch.tensor([[positions.shift]]),
        }


def read_images(request: GenerationRequest, reader: ImagePromptReader | None) -> SglangImages:
    """Return the images of a request that has some.

    Raises:
        InvalidRequestError: the model takes none, one cannot be read, or the prompt is of others.
    """
    if reader is None:
        raise InvalidRequestError(
            f"request {request.request_id}: {len(request.images)} images for a model that takes "
            "none; serve a vision-language model, or leave them out"
        )
    prompt = reader.read(request.prompt_token_ids, request.images)
    return SglangImages(prompt, torch.from_numpy(prompt.pixel_values))


def create(config: RunConfig) -> SglangEngine:
    """Return the engine for a run configuration.

    Raises:
        ConfigError: SGLang is not installed, or keys contradict each other.
    """
    if installed_sglang() is None:
        raise MissingPackageError(
            "actor_rollout_ref.rollout.name is 'sglang', but SGLang is not installed here; install "
            "sglang 0.5.23 beside sluice, in an environment of its own (it needs another torch "
            "than vLLM does), or set actor_rollout_ref.rollout.name=torch"
        )
    return SglangEngine(sglang_settings(config))


class SglangEngine(VendorEngine[SglangCore]):
    """See `services.rollout.engines.protocol.Engine`."""

    def __init__(self, settings: SglangSettings) -> None:
        super().__init__("SGLang", settings)
        self._settings = settings

    async def start(self) -> None:
        """Start SGLang; see the protocol."""
        _survive_quit_signals()
        await self._build(SglangCore.build(self._settings))

    async def _read_images(self, request: GenerationRequest) -> SglangImages | None:
        if not request.images:
            return None
        reader = self._in_thread()[1].image_prompts
        return await self._image_turn.read(
            len(request.sample_indexes), lambda: read_images(request, reader)
        )


def _survive_quit_signals() -> None:
    """Ignore SIGQUIT, which a failing process of SGLang sends; its end is noticed anyway."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        signal.signal(signal.SIGQUIT, lambda *_: None)
