"""The bounded contexts: one package each, with the same files in each (models, services, selectors, api, views, domain)."""
