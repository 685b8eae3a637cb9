"""Transfer weights from the trainer to its replicas, bit for bit.

`sender` and `receiver` are the two ends; where several trainer ranks hold the weights (`holdings`),
each has a `rank_sender`. The ends form transfer `group`s of one epoch, whose members meet at the
`rendezvous` store, and run the loop of `transfer` over the layout of `plan`. Weights or a
`snapshot` go in, whole or as a `delta`; a version whose `digest` equals the sender's comes out in
staging memory. `backend` makes the process groups.
"""
