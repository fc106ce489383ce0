"""`/healthz`: whether this web process can do its work, and what it misses. No login; says nothing else."""

from __future__ import annotations

import redis
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe

from controlplane import redis_client


def _database_answers() -> bool:
    try:
        with connection.cursor() as cursor:
            cursor.execute("select 1")
    except (DatabaseError, InterfaceError):
        return False
    return True


def _redis_answers() -> bool:
    client = redis.Redis.from_url(settings.REDIS_URL, **redis_client.patience())
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    """200 when PostgreSQL and Redis answer, else 503 with the missing ones."""
    missing = [
        name for name, answers in (("postgresql", _database_answers), ("redis", _redis_answers)) if not answers()
    ]
    return JsonResponse({"status": "degraded" if missing else "ok", "missing": missing}, status=503 if missing else 200)
