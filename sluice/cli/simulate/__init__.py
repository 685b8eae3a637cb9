"""`sluice simulate`: options, the subject that they describe, and what is printed of its
simulation.
"""
