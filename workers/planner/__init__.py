"""Celery tasks, thin: load state, call the domain, save the result and its reasons."""
