"""`sluice plan`: divide a launch's devices, and say by phase whether each of them has the memory."""
