from django.apps import AppConfig


class TenancyConfig(AppConfig):
    name = "apps.tenancy"
    label = "tenancy"

    def ready(self) -> None:
        from apps.tenancy import selectors
        from apps.topology.configuration import register_section

        register_section("tenants", selectors.tenants_section)
        register_section("keys", selectors.keys_section)
