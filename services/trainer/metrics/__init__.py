"""The run's metrics by verl's names, and their sinks. In: what the loop measured. Out: files, log
lines and calls to vendors' servers. Each sink is a plug-in, imported when `trainer.logger` names
it.
"""
