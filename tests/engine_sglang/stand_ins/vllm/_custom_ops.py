"""Named while a model is built; rotations are computed by SGLang's own torch code."""

rotary_embedding = None
