"""Opens, limits, journals, commits and aborts migrations."""
