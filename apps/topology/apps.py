from django.apps import AppConfig


class TopologyConfig(AppConfig):
    name = "apps.topology"
    label = "topology"

    def ready(self) -> None:
        from apps.topology import selectors
        from apps.topology.configuration import register_section

        register_section("model", lambda partition: partition.model)
        register_section("network", lambda partition: partition.network)
        register_section("nodes", selectors.nodes_section)
        register_section("routing", lambda partition: {"policy": partition.routing_policy})
        register_section("lease", lambda partition: partition.lease)
