"""Images of prompts: what a file says of itself, limits, and what models make of them."""
