"""What is named while transformers' processors are imported."""

from torchvision.transforms.functional import InterpolationMode

__all__ = ["InterpolationMode"]
