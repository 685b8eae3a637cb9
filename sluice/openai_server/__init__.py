"""An OpenAI-compatible HTTP server, for programs that evaluate the policy in training.

Chat and completion requests come in. Whole answers or streams go out. Only `web_app` imports
aiohttp.
"""
