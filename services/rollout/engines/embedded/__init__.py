"""The embedded engine: continuous batching of any Hugging Face causal language model in this
process, on torch alone. `engine` runs the steps of `loop` in a thread; `rows` holds the running
samples, a `decoder` turns tokens into logits over the slots of `kv_cache`. Requests come in through
`engine`; token chunks go out after each step.
"""
