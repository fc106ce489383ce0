"""Clusters, partitions, nodes, phases, health, and the published configuration document."""
