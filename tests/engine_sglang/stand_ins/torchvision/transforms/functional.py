"""What is named while SGLang is imported."""

from enum import Enum


class InterpolationMode(Enum):
    """Ways to resize an image."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


pil_to_tensor = None
to_pil_image = None
