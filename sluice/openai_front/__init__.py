"""An HTTP front in the OpenAI dialect, for programs that evaluate the policy in training. In:
chat and completion requests. Out: whole answers or streams. Only `web_app` imports aiohttp.
"""
