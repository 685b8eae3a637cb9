"""`sluice doctor`: what on this machine would keep a run from working, each with its remedy."""
