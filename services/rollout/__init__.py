"""The rollout service: one replica of the policy. Prompts and new weights come in; sampled tokens
with logprobs and versions, and counters for the trainer, go out. `servicer` answers calls,
`registration` keeps the replica known to the trainer, `prompt_encoder` renders prompts,
`generation` turns chunks into samples, `tool_calls` reads their answers, `engines` compute them.
"""

from services.rollout.engines.vendor_engines.owner_watch import end_with_owner

end_with_owner()  # before anything else: the other imports of a vendor's process take seconds
