"""Websocket addresses of the console."""

from __future__ import annotations

from django.urls import path

from apps.console.consumers import LiveConsumer

websocket_urlpatterns = [path("ws/live/<str:partition>/", LiveConsumer.as_asgi())]
