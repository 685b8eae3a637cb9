"""Domain values to protobuf and back, and the checks of incoming requests: the only place that
does either. One module a proto package, and `fields` for what they share.
"""
