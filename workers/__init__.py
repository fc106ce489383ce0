"""Everything that runs outside the web process."""
