"""The Django project: settings, urls, asgi, celery, embedded services, the process supervisor."""
