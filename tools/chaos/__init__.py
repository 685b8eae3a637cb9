"""Run the whole loop under faults and check what is left; `make chaos`."""
