"""From the gateway's Redis stream into telemetry rows, exactly once: the cursor is stored with the rows."""

from __future__ import annotations

import json
from typing import Any

from apps.telemetry.services import Stored, cursor_of, store_entries
from apps.topology.models import Partition
from controlplane import redis_client

BATCH = 500
MAX_BATCHES = 20


def read_stream(partition: Partition) -> list[Stored]:
    """Store what is new on the stream, at most `MAX_BATCHES` batches. Raises `redis.RedisError` when Redis is away."""
    stored = []
    stream = redis_client.telemetry_stream(partition.name)
    for _ in range(MAX_BATCHES):
        found: Any = redis_client.client().xread({stream: cursor_of(partition)}, count=BATCH)
        entries = found[0][1] if found else []
        if not entries:
            break
        stored.append(store_entries(partition, [_decoded(fields) for _, fields in entries], _text(entries[-1][0])))
        if len(entries) < BATCH:
            break
    return stored


def _decoded(fields: dict[Any, Any]) -> dict[str, Any]:
    """The JSON object of an entry; anything else becomes an entry that the store passes over and logs."""
    raw = fields.get(b"d", fields.get("d"))
    try:
        document = json.loads(raw) if raw is not None else None
    except ValueError:
        document = None
    return document if isinstance(document, dict) and "kind" in document else {"kind": "unreadable"}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
