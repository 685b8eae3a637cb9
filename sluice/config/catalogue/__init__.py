"""What every key of verl's (and sluice's own) configuration means here, one table a section. A
key is honoured, mapped, without effect, or refused with its reason.
"""
