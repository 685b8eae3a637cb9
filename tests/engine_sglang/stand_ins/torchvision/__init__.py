"""Stands in for torchvision, which SGLang imports for images and whose builds need CUDA's torch."""

__version__ = "0.1"
