"""The shared code of the adapters of vLLM and SGLang; all of it is sluice's own.

The core in the event loop of the vendor's client, the run of one request, how the vendor's
processes receive weights, and their end. Requests come in through `engine`, run in `request`, and
leave as a stream of chunks; weights come in through `weight_worker` in each of the vendor's
processes, and `worker_group` makes one receiver of them. Nothing here imports a vendor package; a
vendor's core adds what differs: how to send one sample, pause, and swap weights.
"""
