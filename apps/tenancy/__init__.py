"""Tenants, API keys, roles, sharing domains."""
