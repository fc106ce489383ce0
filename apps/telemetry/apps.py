from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "apps.telemetry"
    label = "telemetry"

    def ready(self) -> None:
        from django.db.models.signals import post_save

        from apps.telemetry.webhooks import tell_published
        from apps.topology.models import ConfigurationVersion

        post_save.connect(tell_published, sender=ConfigurationVersion, dispatch_uid="telemetry.webhooks")
