"""The rollout service: one replica of the policy. Prompts and new weights come in; sampled tokens
with logprobs and versions, and counters for the trainer, go out. `servicer` and `registration` talk
to others, `generation` turns chunks into samples, and `engines` compute them.
"""

from services.rollout.engines.external.owner_watch import end_with_owner

end_with_owner()  # before anything else: the other imports of a vendor's process take seconds
