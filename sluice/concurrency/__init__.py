"""Structured concurrency: shutdown signals and waits with deadlines."""
