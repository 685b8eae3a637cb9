"""What is named while transformers is imported."""

ImageReadMode = None
decode_image = None
decode_jpeg = None
