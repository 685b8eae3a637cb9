"""The Python SDK: watch a run, generate with the policy in training, submit prompts to it."""
