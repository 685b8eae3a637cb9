"""What the adapters of vLLM and SGLang share: an engine whose client runs in a thread of its own,
the run of one request, and the end of the vendor's processes. Requests come in through `engine`,
run in `core` and `request`, and leave as a stream of chunks. Nothing here imports a vendor package;
a vendor's core adds what differs: how to send one sample, pause, and swap weights.
"""
