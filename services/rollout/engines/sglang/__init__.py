"""The SGLang adapter. `client` is the only module that imports SGLang. Requests and weight
versions come in through `engine`; token chunks go out.
"""
