"""Keep processes: start them together, pass on their logs, restart them by policy, end them in
order. In: service specifications. Out: how the run ended.
"""
