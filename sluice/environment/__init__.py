"""Serve a user's environment of multi-turn episodes as EnvironmentService.

A file defines a class (`classes`), a function (`loops`) or verl's tools (`verl_tools`); `loading`
finds which. `servicer` holds the open episodes. ``python -m sluice.environment`` serves a file.
"""
