"""Websocket addresses of the console."""

from __future__ import annotations

from django.urls import path, re_path

from apps.console.consumers import LiveConsumer, Nowhere

websocket_urlpatterns = [path("ws/live/<str:partition>/", LiveConsumer.as_asgi()), re_path("", Nowhere.as_asgi())]
