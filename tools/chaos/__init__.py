"""Runs the whole loop under faults and checks what is left of it."""
