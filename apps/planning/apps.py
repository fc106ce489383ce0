from django.apps import AppConfig


class PlanningConfig(AppConfig):
    name = "apps.planning"
    label = "planning"

    def ready(self) -> None:
        from apps.planning import learning, selectors, warmups
        from apps.topology.configuration import register_node_overlay, register_section

        register_section("slo", selectors.slo_section)
        register_node_overlay(learning.coefficient_overlay)
        register_node_overlay(warmups.trial_limits)
