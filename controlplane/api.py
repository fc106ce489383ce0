"""The REST API's entry: one NinjaAPI that every app's router joins."""

from __future__ import annotations

from ninja import NinjaAPI

api = NinjaAPI(title="Switchyard", version="1", urls_namespace="rest", docs_url="/docs")
