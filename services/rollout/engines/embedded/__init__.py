"""The embedded engine: continuous batching of any Hugging Face causal language model in this
process, on torch alone. One thread owns the model and runs prefill and decode steps. Requests
come in through `engine`; token chunks go out after each step.
"""
