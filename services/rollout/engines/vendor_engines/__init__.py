"""The shared code of the adapters of vLLM and SGLang; all of it is sluice's own.

The core in the event loop of the vendor's client, the run of one request, how the vendor's
processes receive weights, and their end. Requests come in through `engine`, run in `request`, and
leave as a stream of chunks; weights come in through `weight_worker` in each of the vendor's
processes, and `worker_group` makes one receiver of them. Nothing here imports a vendor package.

The package of a vendor's adapter adds what differs (`vllm` and `sglang` beside this one):

settings  `settings.VendorSettings`: the run configuration in the vendor's own words
client    imports the vendor, alone; an `engine.VendorClient`: pauses, resumes, ends the vendor's
          processes, and calls the methods of the workers
workers   imported in the vendor's processes (`vllm.worker_extension`, `sglang.scheduler`): a
          `weight_worker.WeightWorker` around the model there
engine    an `engine.VendorCore` with `name`, `build`, `seed`, `deltas` and `check_alive`; where
          the vendor needs or can do more, also `so_far`, `read_images`, `_note_weights` (which new
          weights need, as the prefix cache must forget the old ones'), `sleep` and `wake`. Then a
          `ThreadedEngine` of it, and `create`, which `registry` calls
"""
