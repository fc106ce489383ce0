"""HTTP to Django, websockets to Channels; served by uvicorn."""

import gc
import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from django.core.asgi import get_asgi_application

http = get_asgi_application()

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.urls import get_resolver

from apps.console.routing import websocket_urlpatterns
from controlplane import celery, redis_client

application = ProtocolTypeRouter(
    {"http": http, "websocket": AllowedHostsOriginValidator(AuthMiddlewareStack(URLRouter(websocket_urlpatterns)))}
)

celery.send_within(redis_client.ANSWER_WITHIN_S)
# What is loaded now stays: a search for cycles through all of it took a fifth of a second in the middle of a page.
_ = get_resolver().url_patterns
gc.collect()
gc.freeze()
