"""Stands in for torchaudio, which SGLang imports for sound and whose builds need CUDA's torch."""
