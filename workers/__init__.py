"""Everything that runs outside the web process."""

import apps  # noqa: F401  # which puts compiled modules in use before any is imported
