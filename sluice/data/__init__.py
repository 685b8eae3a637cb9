"""Rows of prompts in files: read, check, convert. Parquet and JSON-lines files come in; checked
rows in verl's format go out. No torch, no service.
"""
