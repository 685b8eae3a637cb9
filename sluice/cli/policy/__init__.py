"""Commands that use the policy in training: `generate`, `score`, `submit`, `eval`, and more."""
