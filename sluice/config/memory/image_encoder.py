"""What an image encoder takes beside its language model, by formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_CHANNELS, _FLOAT = 3, 4


@dataclass(frozen=True, slots=True)
class ImageEncoder:
    """The sizes of the vision tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL.

    Attributes:
        layers: transformer blocks.
        width: of a patch's hidden state.
        inner: width inside a block's perceptron.
        projections: matrices of the perceptron; 3 if it has a gate.
        merged: patches that become one token.
        numbers: of a patch's pixels.
        out: width of the language model.
        mergers: of the last block and of those whose states deeper layers add.
        positions: learned ones.
    """

    layers: int
    width: int
    inner: int
    projections: int
    merged: int
    numbers: int
    out: int
    mergers: int = 1
    positions: int = 0

    @property
    def parameters(self) -> int:
        """Weights, without norms and biases."""
        block = 4 * self.width**2 + self.projections * self.width * self.inner
        joined = self.merged * self.width
        ends = self.width * (self.numbers + self.positions)
        return self.layers * block + ends + self.mergers * joined * (joined + self.out)

    @property
    def pixel_bytes(self) -> int:
        """Of the pixels of one token."""
        return self.merged * self.numbers * _FLOAT

    def kept(self, *, recomputes: bool, dtype_bytes: int) -> float:
        """Return the bytes that one token leaves for the backward pass.

        A block keeps the inputs of its norms, projections and attention, without dropout
        (Korthikanti et al. 2022, section 4.1); if it is recomputed, its own input, and one block
        has all of them at a time.
        """
        block = 8 * self.width + self.projections * self.inner
        numbers = self.layers * self.width + block if recomputes else self.layers * block
        return float(self.merged * numbers * dtype_bytes)


def image_encoder(vision: Mapping[str, object]) -> ImageEncoder | None:
    """Return the encoder that the `vision_config` of a config.json describes.

    Returns:
        `None` for one of another family.
    """
    sizes = {name: size for name, size in vision.items() if isinstance(size, int)}
    try:
        # In Qwen2-VL `hidden_size` is the language model's.
        is_first = "embed_dim" in sizes
        width = sizes["embed_dim" if is_first else "hidden_size"]
        ratio = vision.get("mlp_ratio", 4)
        inner = int(width * ratio) if is_first and isinstance(ratio, int | float) else 0
        deeper = vision.get("deepstack_visual_indexes")
        return ImageEncoder(
            layers=sizes["depth"],
            width=width,
            inner=inner or sizes["intermediate_size"],
            projections=3 if "fullatt_block_indexes" in vision else 2,
            merged=sizes.get("spatial_merge_size", 2) ** 2,
            numbers=_CHANNELS * sizes.get("temporal_patch_size", 2) * sizes["patch_size"] ** 2,
            out=sizes["hidden_size" if is_first else "out_hidden_size"],
            mergers=1 + (len(deeper) if isinstance(deeper, list) else 0),
            positions=sizes.get("num_position_embeddings", 0),
        )
    except KeyError:
        return None
