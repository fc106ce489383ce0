"""Samples, rollups, request records as ingested from the gateways."""
