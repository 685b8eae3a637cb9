"""Images of prompts. Encoded files come in; checked bytes, pixels, placeholder tokens and
positions go out. Only `torch_inputs` needs torch.
"""
