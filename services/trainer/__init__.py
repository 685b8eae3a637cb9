"""The trainer: updates the policy, publishes its weights, keeps the fleet of replicas."""
