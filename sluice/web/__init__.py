"""The part that the dashboard and the OpenAI front share: a bound on open connections.

In: a factory of HTTP protocols. Out: one that answers 503 to connections beyond the bound.
"""
