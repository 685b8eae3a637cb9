"""The durable record of a run's prompts. In: each accepted prompt, its end, and the leased batch.
Out: the state that a restarted service continues from. The state of a pending prompt is in
`services.reward.group_table`. Two things are leased: a batch, to the trainer (`ledger`), and a
sample, to a program of the user (`leases`).
"""
