"""Weights from the trainer into its replicas, bit for bit.

`sender` (with a `rank_sender` on each trainer rank that has a holding, `holdings`) and `receiver` are
the two ends; both form a transfer `group` of one epoch, whose members
meet at the `rendezvous` store, and run the loop of `transfer` over the layout of `plan`. Weights or
a `snapshot` go in, whole or as a `sparse_update` coded by `delta`; a version whose `digest` equals
the sender's comes out in staging memory. `backend` makes the process groups.
"""
