"""Commands that show runs: `status`, `runs`, `logs`, `dashboard`, `open`, `report`, `compare`, and
the table that `up` refreshes.
"""
