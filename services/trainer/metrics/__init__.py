"""The run's numbers by verl's names, and the sinks that keep them. What the loop measured comes
in; files, log lines and vendors' servers get it. Each sink is a plug-in, imported when
`trainer.logger` names it.
"""
