"""The part that the dashboard and the OpenAI front share: the HTTP server and its bound on open
connections.

In: an application of aiohttp. Out: its port; connections beyond the bound get 503.
"""
