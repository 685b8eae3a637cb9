"""What a run needs of device memory, from the model's shape and the configuration alone."""
