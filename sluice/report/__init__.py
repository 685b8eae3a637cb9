"""What a finished run amounts to: summary numbers and a page to look at."""
