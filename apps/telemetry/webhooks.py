"""Telling others by HTTP: signed JSON to channels, in order, tried again with growing pauses.

`X-Switchyard-Signature: t=<unix seconds>,v1=<hex HMAC-SHA256 of "<t>.<body>">`, keyed with the channel's secret, as a
receiver can check with six lines (docs/webhooks.md). `X-Switchyard-Delivery` is the same over all tries.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from typing import Any

import httpx
from django.db.models import F
from django.utils import timezone

from apps.telemetry.models import Channel, Delivery
from apps.topology.models import ConfigurationVersion
from controlplane import records
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField

KINDS = ("alert", "decision", "proposal", "switch", "config", "test")
PAUSES_S = (5, 30, 120, 600, 3600)
TIMEOUT_S = 5.0
BATCH = 20
DELIVERED = "delivered"


@dataclass(frozen=True, slots=True)
class NewChannel:
    """A channel with its secret, which is shown once."""

    channel: Channel
    secret: str

    def __repr__(self) -> str:
        return f"NewChannel({self.channel})"


def create_channel(
    name: str, url: str, actor: Actor, reason: str = "", kinds: Sequence[str] = ("alert",)
) -> NewChannel:
    """Raises InvalidField, or Conflict when the name is taken."""
    with change(actor, reason, role="administrator"):
        if Channel.objects.filter(name=name).exists():
            raise Conflict(f"there is a channel called {name} already", "already-exists")
        secret = _new_secret()
        channel = Channel(name=name, url=url, secret=secret, kinds=_checked(kinds))
        records.validate(channel)
        channel.save()
    return NewChannel(channel, secret)


def update_channel(channel: Channel, actor: Actor, reason: str = "", **changes: Any) -> Channel:
    """Edits `url`, `kinds`, `enabled`. Raises InvalidField."""
    with change(actor, reason, role="administrator"):
        row = records.locked(channel)
        if "kinds" in changes:
            changes["kinds"] = _checked(changes["kinds"])
        if records.apply(row, changes, frozenset({"url", "kinds", "enabled"})):
            row.save()
    return row


def rotate_secret(channel: Channel, actor: Actor, reason: str = "") -> NewChannel:
    """A new secret; what is sent from now on is signed with it alone."""
    with change(actor, reason or f"secret of channel {channel.name} rotated", role="administrator"):
        row = records.locked(channel)
        row.secret, row.secret_set_at = _new_secret(), timezone.now()
        row.save(update_fields=["secret", "secret_set_at"])
    return NewChannel(row, row.secret)


def _new_secret() -> str:
    return "whsec_" + secrets.token_urlsafe(32)


def delete_channel(channel: Channel, actor: Actor, reason: str = "") -> None:
    with change(actor, reason, role="administrator"):
        channel.delete()


def test_channel(channel: Channel, actor: Actor, reason: str = "") -> str:
    """Sends one message at once and says how it went: `DELIVERED`, or what went wrong."""
    with change(actor, reason or f"channel {channel.name} tested", role="administrator"):
        body = {"event": "test", "at": time.time(), "data": {"text": f"{actor} tests the channel {channel.name}"}}
        delivery = Delivery.objects.create(
            channel=channel, event_id=secrets.token_hex(12), kind="test", body=body, attempts=1
        )
    _send(delivery, timezone.now(), final=True)
    return channel.last_status


test_channel.__test__ = False  # type: ignore[attr-defined]


def _checked(kinds: Sequence[str]) -> list[str]:
    known = ("*", *KINDS)
    if not kinds or any(kind not in known for kind in kinds):
        raise InvalidField("kinds", f"expected one or more of {', '.join(known)}")
    return list(dict.fromkeys(kinds))


def tell(kind: str, data: dict[str, Any]) -> int:
    """Queues a message for every channel that wants this kind; `deliver_due` sends it. Returns how many."""
    wanted = [c for c in Channel.objects.filter(enabled=True) if kind in c.kinds or "*" in c.kinds]
    event_id, body = secrets.token_hex(12), {"event": kind, "at": time.time(), "data": data}
    Delivery.objects.bulk_create([Delivery(channel=c, event_id=event_id, kind=kind, body=body) for c in wanted])
    return len(wanted)


def tell_published(instance: ConfigurationVersion, created: bool, **_: Any) -> None:
    """A new version of a partition's configuration."""
    if created:
        said = {"version": instance.version, "author": instance.author, "reason": instance.reason}
        tell("config", {"partition": instance.partition.name, **said})


def deliver_due(now: datetime | None = None) -> int:
    """Sends what is due, oldest first; returns how many were delivered. One worker at a time takes a message."""
    moment = now or timezone.now()
    due = Delivery.objects.filter(delivered_at=None, given_up_at=None, next_try_at__lte=moment, channel__enabled=True)
    done = 0
    for delivery in due.select_related("channel").order_by("id")[:BATCH]:
        # Claimed by moving its next try: a second worker, or this one after a crash, comes back to it later.
        claim = due.filter(pk=delivery.pk, attempts=delivery.attempts)
        if claim.update(attempts=F("attempts") + 1, next_try_at=moment + timedelta(seconds=60)):
            delivery.attempts += 1
            done += _send(delivery, moment)
    return done


def signature(secret: str, at: int, body: bytes) -> str:
    digest = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={digest}"


@cache
def _client() -> httpx.Client:
    return httpx.Client(timeout=TIMEOUT_S, follow_redirects=False)


def _send(delivery: Delivery, now: datetime, final: bool = False) -> bool:
    channel = delivery.channel
    body = json.dumps({"id": delivery.event_id, **delivery.body}, separators=(",", ":")).encode()
    at = int(now.timestamp())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "switchyard",
        "X-Switchyard-Event": delivery.kind,
        "X-Switchyard-Delivery": delivery.event_id,
        "X-Switchyard-Signature": signature(channel.secret, at, body),
    }
    try:
        answer = _client().post(channel.url, content=body, headers=headers)
        said = "" if answer.is_success else f"answered {answer.status_code}"
    except httpx.HTTPError as error:
        said = f"{type(error).__name__}: {error}"[:200]
    if said:
        delivery.last_error = said[:300]
        if final or delivery.attempts > len(PAUSES_S):
            delivery.given_up_at = now
        else:
            delivery.next_try_at = now + timedelta(seconds=PAUSES_S[delivery.attempts - 1])
    else:
        delivery.delivered_at = now
    delivery.save()
    channel.last_status, channel.last_at = (said or DELIVERED)[:200], now
    channel.save(update_fields=["last_status", "last_at"])
    return not said
