"""Turning a trainer's checkpoint into an ordinary Hugging Face model directory."""
