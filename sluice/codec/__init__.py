"""Domain values to protobuf and back: the only place that does it."""
