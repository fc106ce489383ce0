"""`Idempotency-Key` on POSTs: the effect and the remembered answer are stored in one transaction, for a day.

A repeat gets the first answer with `Idempotent-Replayed: true`. Secrets shown once (`secret`) are not remembered. Two
repeats at the same moment: the second waits for the first one's row. An answer that is an error is not kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import IntegrityError, transaction
from django.http import HttpRequest, HttpResponse
from django.utils import timezone

from apps.tenancy.models import IdempotentCall
from controlplane.actors import Actor
from controlplane.rest.auth import authenticate
from controlplane.rest.problems import problem

KEPT = timedelta(hours=24)
MAX_KEY_CHARS = 200
View = Callable[..., HttpResponse]


def idempotent(view: View) -> View:
    """Wraps an operation; does nothing unless it is a POST with the header from a known caller."""

    @wraps(view)
    def wrapper(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        key = request.headers.get("Idempotency-Key", "")
        if request.method != "POST" or not key:
            return view(request, **kwargs)
        if len(key) > MAX_KEY_CHARS or not key.isprintable():
            detail = f"Idempotency-Key: expected at most {MAX_KEY_CHARS} printable characters"
            return problem(
                request, 422, "invalid-field", detail, errors=[{"field": "Idempotency-Key", "message": detail}]
            )
        try:
            actor = authenticate(request)
            _ = request.body
        except (PermissionDenied, RequestDataTooBig):
            actor = None
        # The operation itself answers for a caller that is not known, and for a body that it would not read.
        return view(request, **kwargs) if actor is None else _once(view, request, kwargs, actor, key)

    return wrapper


def _once(view: View, request: HttpRequest, kwargs: dict[str, Any], actor: Actor, key: str) -> HttpResponse:
    fingerprint = hashlib.sha256(f"{request.get_full_path()}\n".encode() + request.body).hexdigest()
    caller = f"{actor.kind}:{actor.name}"
    IdempotentCall.objects.filter(created_at__lt=timezone.now() - KEPT).delete()
    try:
        with transaction.atomic():
            call = IdempotentCall.objects.create(actor=caller, key=key, request_sha256=fingerprint)
            response = view(request, **kwargs)
            if response.status_code >= 400:
                transaction.set_rollback(True)
            else:
                call.status, call.body = response.status_code, _without_secret(response)
                call.save(update_fields=["status", "body"])
            return response
    except IntegrityError:
        known = IdempotentCall.objects.filter(actor=caller, key=key).first()
        if known is None:
            raise
    return _replay(request, known, fingerprint)


def _replay(request: HttpRequest, known: IdempotentCall, fingerprint: str) -> HttpResponse:
    if known.request_sha256 != fingerprint:
        detail = "this Idempotency-Key was used for another request; take a new one"
        return problem(request, 422, "idempotency-key-reused", detail)
    response = HttpResponse(known.body, status=known.status, content_type="application/json; charset=utf-8")
    response["Idempotent-Replayed"] = "true"
    return response


def _without_secret(response: HttpResponse) -> str:
    body = json.loads(response.content or b"null")
    if isinstance(body, dict) and "secret" in body:
        body["secret"] = None
    return json.dumps(body)
