"""The SGLang adapter. Only `client` and, in SGLang's own processes, `scheduler` import SGLang.
Requests come in through `engine` and weight versions through `scheduler`; token chunks go out.
"""
