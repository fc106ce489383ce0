"""REST of alert rules and of the charts' points."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from django.db import transaction
from django.http import HttpRequest, HttpResponse
from ninja import Query, Router, Schema
from pydantic import AwareDatetime, Field

from apps.telemetry import alerting, samples
from apps.telemetry.models import AlertSetting
from apps.telemetry.rules import BY_NAME, RULES, Rule
from apps.topology.models import Partition
from apps.topology.selectors import partition_named
from controlplane import records
from controlplane.errors import NotFound
from controlplane.permissions import require
from controlplane.rest.etags import check_if_match, tagged
from controlplane.rest.schemas import Edit, Finite, Storable

router = Router(tags=["alerts"])
LONGEST_S = 30 * 86_400.0


class RuleOut(Schema):
    """`threshold` is in `unit`, null where there is nothing to set; it fires once it has held for `for_s` seconds. `means`,
    `look` and `do` are its runbook. A silenced rule tells no channel until then; its alerts are still raised."""

    name: str
    title: str
    severity: str
    for_s: float
    threshold: float | None
    own_threshold: bool
    unit: str
    enabled: bool
    silenced_until: datetime | None
    means: str
    look: str
    do: str


class RuleEdit(Edit):
    """`threshold` null: the rule's own. `silenced_until` null: channels are told again."""

    enabled: bool | None = None
    threshold: Finite | None = None
    silenced_until: AwareDatetime | None = None


class HistoryQuery(Storable):
    seconds: float = Field(3600.0, gt=0, le=LONGEST_S)


def _rule(partition: Partition, name: str) -> RuleOut:
    """Raises NotFound."""
    if name not in BY_NAME:
        raise NotFound("rule", name)
    return _shown(BY_NAME[name], AlertSetting.objects.filter(partition=partition, rule=name).first())


def _shown(rule: Rule, setting: AlertSetting | None) -> RuleOut:
    return RuleOut(
        name=rule.name,
        title=rule.title,
        severity=rule.severity.value,
        for_s=rule.for_s,
        threshold=alerting.threshold_of(rule, setting),
        own_threshold=setting is not None and setting.threshold is not None,
        unit=rule.unit,
        enabled=setting is None or setting.enabled,
        silenced_until=setting.silenced_until if setting else None,
        means=rule.means,
        look=rule.look,
        do=rule.do,
    )


@router.get("/partitions/{partition}/alert-rules", response=list[RuleOut])
def list_alert_rules(request: HttpRequest, partition: str) -> Any:
    require(request, "viewer")
    row = partition_named(partition)
    settings = {setting.rule: setting for setting in AlertSetting.objects.filter(partition=row)}
    return [_shown(rule, settings.get(rule.name)) for rule in RULES]


@router.get("/partitions/{partition}/alert-rules/{name}", response=RuleOut)
def get_alert_rule(request: HttpRequest, response: HttpResponse, partition: str, name: str) -> Any:
    require(request, "viewer")
    return tagged(response, _rule(partition_named(partition), name))


@router.patch("/partitions/{partition}/alert-rules/{name}", response=RuleOut)
def edit_alert_rule(request: HttpRequest, response: HttpResponse, partition: str, name: str, payload: RuleEdit) -> Any:
    actor = require(request, "operator")
    with transaction.atomic():
        row = records.locked(partition_named(partition))
        check_if_match(request, _rule(row, name))
        changes = payload.changes()
        if changes:
            alerting.set_rule(row, name, actor, payload.reason, **changes)
    return tagged(response, _rule(row, name))


@router.get("/partitions/{partition}/history", response=list[dict[str, Any]])
def list_history(request: HttpRequest, partition: str, query: Query[HistoryQuery]) -> Any:
    """What the console's charts draw of the last seconds, oldest first, at most some hundred points; kept for 30 days."""
    require(request, "viewer")
    now = time.time()
    return samples.between(partition_named(partition), now - query.seconds, now)
