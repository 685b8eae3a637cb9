"""The stand-alone evaluation: in the trainer's place it leads replicas that serve a model's files,
and a reward service, through one validation, and writes the results. Nothing is trained.
"""
