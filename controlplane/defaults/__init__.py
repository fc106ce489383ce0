"""Data of the default run."""
