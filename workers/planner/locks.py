"""One planner and one switch driver per partition: PostgreSQL advisory locks, which end with their owner's connection."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection


@contextmanager
def partition_lock(kind: str, partition_id: int) -> Iterator[bool]:
    """Whether this connection holds the lock `kind` of a partition; never waits for it."""
    key = zlib.crc32(f"switchyard.{kind}".encode()) - 2**31
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", [key, partition_id])
        mine = bool(cursor.fetchone()[0])
    try:
        yield mine
    finally:
        if mine and connection.connection is not None and not connection.connection.closed:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", [key, partition_id])
