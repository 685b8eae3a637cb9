"""Rows of prompts in files: reading, checking, converting; no torch, no service."""
