"""DAPO and GRPO training of language models: what the three services and their users share."""
