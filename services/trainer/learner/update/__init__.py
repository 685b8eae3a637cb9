"""One update: the optimizer steps of one train batch. A batch with scores comes in; advantages,
losses, optimizer steps of the policy and the critic, and the update's metrics come out.
"""
