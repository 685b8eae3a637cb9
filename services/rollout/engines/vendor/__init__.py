"""What the adapters of vLLM and SGLang share: the core in the event loop of the vendor's client,
the run of one request, and the end of the vendor's processes. Requests come in through `core`, run
in `request`, and leave as a stream of chunks. Nothing here imports a vendor package; a vendor's
core adds what differs: how to send one sample, pause, and swap weights.
"""
