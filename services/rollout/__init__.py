"""The rollout service: one replica samples responses and takes new weights as they come."""
