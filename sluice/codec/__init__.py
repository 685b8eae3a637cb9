"""The only place that turns domain values into protobuf and back, and checks incoming requests.

Messages come in, and values or InvalidRequestError go out; and the other way round. One module for
each proto package; `messages` and `fields` hold what they share.
"""
