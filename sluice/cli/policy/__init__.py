"""Commands that ask the policy in training: `generate`, `score`, `submit`, `eval`, `serve-
openai`.
"""
