"""Commands that look at runs: they read folders, and change nothing but what their name says."""
