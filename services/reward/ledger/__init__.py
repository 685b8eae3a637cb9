"""The durable record of every accepted prompt. In: a prompt and each change of its state. Out:
where a prompt stands, and after a crash the content that the service continues from.
"""
