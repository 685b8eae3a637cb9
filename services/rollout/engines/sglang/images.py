"""Images of a prompt as SGLang takes them: the patches and positions that the trainer has too.

SGLang would resize images by its own rules and read the prompt's text again. It takes what a
processor has made instead, with the token ids as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.rollout.engines.protocol import GenerationRequest
from sluice.errors import InvalidRequestError
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
