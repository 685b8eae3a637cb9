"""The vLLM adapter. `client` is the only module of the engine's process that imports vLLM;
`worker_extension` runs inside vLLM's own processes. Requests and weight versions come in through
`engine`; token chunks go out.
"""
