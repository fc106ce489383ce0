from django.apps import AppConfig
from django.db.models.signals import post_save


class TenancyConfig(AppConfig):
    name = "apps.tenancy"
    label = "tenancy"

    def ready(self) -> None:
        from apps.tenancy import selectors, services
        from apps.topology.configuration import register_section

        register_section("tenants", selectors.tenants_section)
        register_section("keys", selectors.keys_section)
        post_save.connect(services.owner_saved, sender="auth.User", dispatch_uid="tenancy.owner_saved")
