from django.apps import AppConfig


class KvcacheConfig(AppConfig):
    name = "apps.kvcache"
    label = "kvcache"
