"""Inference engines behind one Protocol (`protocol.Engine`); `registry` finds one by its
configured name. Requests as token ids and weight versions come in; chunks of sampled tokens
with logprobs and counters go out. Modules at this level serve all engines: every engine is a
`threaded_engine` around a core of its own. Each engine has a package.
"""
