from django.contrib import admin

from apps.topology.models import Cluster, ConfigurationVersion, Node, Partition
from controlplane.admin import ReadOnlyAdmin


@admin.register(Cluster)
class ClusterAdmin(ReadOnlyAdmin):
    list_display = ("name", "title")


@admin.register(Partition)
class PartitionAdmin(ReadOnlyAdmin):
    list_display = ("name", "cluster", "title", "gateway_url", "routing_policy")


@admin.register(Node)
class NodeAdmin(ReadOnlyAdmin):
    list_display = (
        "name",
        "partition",
        "engine",
        "desired_phase",
        "generation",
        "observed_state",
        "draining",
        "enabled",
    )
    list_filter = ("partition", "desired_phase", "observed_state")


@admin.register(ConfigurationVersion)
class ConfigurationVersionAdmin(ReadOnlyAdmin):
    list_display = ("partition", "version", "author", "reason", "created_at")
    list_filter = ("partition",)
    exclude = ("document",)
