"""The bounded contexts: one package each, with the same files in each (models, services, selectors, api, views, domain)."""

from apps import compiled

RUNS = compiled.use()  # `compiled`, or why the hot modules run as they are
