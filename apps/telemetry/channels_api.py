"""REST of channels: addresses that are told of alerts, decisions, proposals, switches and versions (docs/webhooks.md)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field

from apps.telemetry import webhooks
from apps.telemetry.models import Delivery
from apps.telemetry.selectors import channel_named, channels
from controlplane import records
from controlplane.audit import MAX_REASON_CHARS
from controlplane.permissions import require
from controlplane.rest.etags import check_if_match, tagged
from controlplane.rest.paging import Page, PageQuery, page
from controlplane.rest.schemas import Edit, Reason

router = Router(tags=["channels"])


class ChannelOut(Schema):
    """`last_status` is "delivered" or what went wrong with the last message; blank before the first."""

    name: str
    url: str
    kinds: list[str]
    enabled: bool
    last_status: str
    last_at: datetime | None
    secret_set_at: datetime
    created_at: datetime


class NewChannelOut(Schema):
    """`secret` signs what is sent, and is shown this once; null when the answer repeats an earlier call."""

    channel: ChannelOut
    secret: str | None


class ChannelIn(Reason):
    name: str = Field(max_length=63)
    url: str = Field(max_length=300)
    kinds: list[str] = Field(["alert"], description="alert, decision, proposal, switch, config, test, or * for all")


class ChannelEdit(Edit):
    url: str | None = None
    kinds: list[str] | None = None
    enabled: bool | None = None


class TestedOut(Schema):
    """`status` says what went wrong where `delivered` is false."""

    delivered: bool
    status: str


class DeliveryOut(Schema):
    """One message. Neither delivered nor given up: it is tried again at `next_try_at`."""

    id: int
    event_id: str
    kind: str
    attempts: int
    created_at: datetime
    next_try_at: datetime
    delivered_at: datetime | None
    given_up_at: datetime | None
    last_error: str


@router.get("/channels", response=Page[ChannelOut])
def list_channels(request: HttpRequest, query: Query[PageQuery]) -> Any:
    require(request, "viewer")
    return page(channels(), query, "name")


@router.post("/channels", response={201: NewChannelOut})
def create_channel(request: HttpRequest, payload: ChannelIn) -> Any:
    actor = require(request, "administrator")
    made = webhooks.create_channel(payload.name, payload.url, actor, payload.reason, payload.kinds)
    return Status(201, {"channel": made.channel, "secret": made.secret})


@router.get("/channels/{name}", response=ChannelOut)
def get_channel(request: HttpRequest, response: HttpResponse, name: str) -> Any:
    require(request, "viewer")
    return tagged(response, ChannelOut.from_orm(channel_named(name)))


@router.patch("/channels/{name}", response=ChannelOut)
def edit_channel(request: HttpRequest, response: HttpResponse, name: str, payload: ChannelEdit) -> Any:
    """A channel that is not enabled keeps its unsent messages and gets no new ones."""
    actor = require(request, "administrator")
    with transaction.atomic():
        channel = records.locked(channel_named(name))
        check_if_match(request, ChannelOut.from_orm(channel))
        channel = webhooks.update_channel(channel, actor, payload.reason, **payload.changes())
    return tagged(response, ChannelOut.from_orm(channel))


@router.delete("/channels/{name}", response={204: None})
def delete_channel(request: HttpRequest, name: str, reason: str = Query("", max_length=MAX_REASON_CHARS)) -> Any:
    """Its unsent messages go with it."""
    actor = require(request, "administrator")
    with transaction.atomic():
        channel = records.locked(channel_named(name))
        check_if_match(request, ChannelOut.from_orm(channel))
        webhooks.delete_channel(channel, actor, reason)
    return Status(204, None)


@router.post("/channels/{name}/test", response=TestedOut)
def test_channel(request: HttpRequest, name: str, payload: Reason) -> Any:
    """Sends one message now, also to a channel that is not enabled, and answers once it is through or has failed."""
    actor = require(request, "administrator")
    status = webhooks.test_channel(channel_named(name), actor, payload.reason)
    return {"delivered": status == webhooks.DELIVERED, "status": status}


@router.post("/channels/{name}/rotate", response={201: NewChannelOut})
def rotate_channel_secret(request: HttpRequest, name: str, payload: Reason) -> Any:
    """From the next message on only the new secret signs, those that wait to be sent again included."""
    actor = require(request, "administrator")
    made = webhooks.rotate_secret(channel_named(name), actor, payload.reason)
    return Status(201, {"channel": made.channel, "secret": made.secret})


@router.get("/channels/{name}/deliveries", response=Page[DeliveryOut])
def list_deliveries(request: HttpRequest, name: str, query: Query[PageQuery]) -> Any:
    """Newest first."""
    require(request, "viewer")
    return page(Delivery.objects.filter(channel=channel_named(name)), query, "-id")
