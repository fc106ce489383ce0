from django.apps import AppConfig


class FlowcontrolConfig(AppConfig):
    name = "apps.flowcontrol"
    label = "flowcontrol"

    def ready(self) -> None:
        from apps.flowcontrol import selectors
        from apps.topology.configuration import register_section

        register_section("objectives", selectors.objectives_section)
        register_section("bands", selectors.bands_section)
        register_section("default_band", selectors.default_band_section)
        register_section("flow", selectors.flow_section)
