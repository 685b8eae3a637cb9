"""Supervise processes: start them together, forward their logs, restart them by policy, end them in
order. In: service specifications. Out: how the run ended.
"""
