"""Nothing of it is named while SGLang is imported."""
