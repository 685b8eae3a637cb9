"""`sluice plan`: divide a launch's devices; say by phase whether each has the memory."""
