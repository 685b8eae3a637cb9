"""Commands that show a run: `status`, `dashboard`, and the table that `up` refreshes."""
