"""Who calls: an API key in `Authorization: Bearer`, else a session, whose writes must carry the CSRF token."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest
from ninja.security import HttpBearer
from ninja.security.apikey import APIKeyCookie
from ninja.utils import check_csrf

from apps.tenancy.selectors import key_actor, live_key
from apps.tenancy.services import touch_key
from controlplane.actors import Actor
from controlplane.permissions import Forbidden, NotAuthenticated, actor_of


class CsrfRefused(Forbidden):
    """A session's write without the CSRF token."""

    def __init__(self) -> None:
        Exception.__init__(self, "send the CSRF token (cookie csrftoken) in the header X-CSRFToken")


class InferenceOnly(Forbidden):
    """A key without a role: it is for the gateways."""

    def __init__(self) -> None:
        Exception.__init__(self, "this key is for inference alone; the control plane needs a key with a role")


class KeyAuth(HttpBearer):
    """API keys with a role. Any other is refused at once, whatever session there is."""

    openapi_description = "A control-plane API key; its role decides what it may do."

    def authenticate(self, request: HttpRequest, token: str) -> Actor | None:
        key = live_key(token)
        if key is None:
            raise NotAuthenticated("this API key is unknown, revoked or expired")
        touch_key(key)
        if not key.role:
            raise InferenceOnly
        actor = key_actor(key).during(getattr(request, "request_id", ""))
        request.actor = actor  # type: ignore[attr-defined]
        return actor


class SessionAuth(APIKeyCookie):
    param_name = settings.SESSION_COOKIE_NAME

    def __call__(self, request: HttpRequest) -> Actor | None:
        return self.authenticate(request, self._get_key(request)) if request.user.is_authenticated else None

    def _get_key(self, request: HttpRequest) -> str | None:
        if check_csrf(request):
            raise CsrfRefused
        return request.COOKIES.get(self.param_name)

    def authenticate(self, request: HttpRequest, key: str | None) -> Actor:
        return actor_of(request)


AUTHENTICATORS: list[Any] = [KeyAuth(), SessionAuth()]


def authenticate(request: HttpRequest) -> Actor | None:
    """The caller, None for nobody. Raises NotAuthenticated or CsrfRefused as the authenticators do."""
    for authenticator in AUTHENTICATORS:
        actor: Actor | None = authenticator(request)
        if actor is not None:
            return actor
    return None
