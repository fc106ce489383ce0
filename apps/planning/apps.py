from django.apps import AppConfig


class PlanningConfig(AppConfig):
    name = "apps.planning"
    label = "planning"

    def ready(self) -> None:
        from apps.planning import selectors
        from apps.topology.configuration import register_section

        register_section("slo", selectors.slo_section)
