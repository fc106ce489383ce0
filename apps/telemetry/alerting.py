"""Alerts: what the rules find becomes rows that fire, are acknowledged and resolve; and the settings of the rules."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Any

import redis
from django.db import transaction
from django.utils import timezone

from apps.planning.choices import OrderState
from apps.planning.models import PlannerPolicy, SwitchOrder
from apps.telemetry import samples, webhooks
from apps.telemetry.choices import AlertState
from apps.telemetry.models import Alert, AlertSetting, LoadWindow
from apps.telemetry.rules import BY_NAME, RULES, Facts, Finding, Rule
from apps.telemetry.selectors import live_snapshot
from apps.tenancy.models import ApiKey
from apps.topology.configuration import send_live_event
from apps.topology.models import Partition
from controlplane import records, redis_client
from controlplane.actors import Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField, NotFound, Unavailable
from controlplane.validators import check_future

RATE_OVER_S = 120.0
REUSE_OVER_S = 600.0
FAILED_SHOWN_S = 3600.0
UNWATCHED_AFTER_S = 30.0
_MOVING = (OrderState.ORDERED, OrderState.DRAINING, OrderState.SWITCHING)


def watch(partition: Partition, now: float) -> list[Alert]:
    """One look at a partition: keeps a sample, raises and resolves alerts, tells channels. Returns what changed."""
    try:
        snapshot = live_snapshot(partition)
    except Unavailable:
        snapshot = None
    if snapshot is not None:
        samples.keep(partition, snapshot)
    changed = evaluate(partition, facts_of(partition, snapshot, now))
    with contextlib.suppress(redis.RedisError, OSError):
        redis_client.client().set(redis_client.watched_key(partition.name), f"{now:.3f}")
    return changed


def unwatched_since(partition: Partition, now: float) -> float | None:
    """When the rules were last looked at, if that is too long ago: the planner's worker is away, and nothing can fire.

    None while they are looked at, and where that is not known.
    """
    try:
        found = redis_client.client().get(redis_client.watched_key(partition.name))
        at = float(found) if isinstance(found, bytes | str) else now
    except (redis.RedisError, OSError, ValueError):
        return None
    return at if now - at > UNWATCHED_AFTER_S else None


def facts_of(partition: Partition, snapshot: dict[str, Any] | None, now: float) -> Facts:
    dropped_per_min, lost_ratio = _rates(partition, snapshot, now)
    newest = LoadWindow.objects.filter(partition=partition).order_by("-t1").values_list("t1", flat=True).first()
    orders = SwitchOrder.objects.filter(partition=partition)
    moving = orders.filter(state__in=_MOVING).values_list("ordered_at", flat=True).first()
    failed = orders.first()
    finished = failed.finished_at.timestamp() if failed and failed.finished_at else 0.0
    is_failed = failed is not None and failed.state == OrderState.FAILED and now - finished < FAILED_SHOWN_S
    keys = ApiKey.objects.filter(revoked_at=None, expires_at__isnull=False).select_related("tenant")
    return Facts(
        now=now,
        snapshot=snapshot,
        slo_ttft_s=PlannerPolicy.objects.filter(partition=partition).values_list("slo_ttft_s", flat=True).first(),
        dropped_per_min=dropped_per_min,
        lost_ratio=lost_ratio,
        telemetry_age_s=None if newest is None else now - newest,
        moving_order_s=None if moving is None else now - moving.timestamp(),
        failed_order=f"order {failed.pk} failed: {failed.outcome}"[:280] if failed is not None and is_failed else "",
        keys_expiring=tuple((str(key), key.expires_at.timestamp() - now) for key in keys if key.expires_at),
    )


def _rates(partition: Partition, snapshot: dict[str, Any] | None, now: float) -> tuple[float | None, float | None]:
    """Refused requests a minute, and the share of reusable tokens that was computed again. A restart gives None."""
    if snapshot is None:
        return None, None
    point = samples.point_of(snapshot)
    past = samples.before(partition, now - RATE_OVER_S)
    dropped = None
    if past and past.get("dropped") is not None and point["dropped"] is not None:
        more, over_s = point["dropped"] - past["dropped"], point["t"] - past["t"]
        dropped = more / over_s * 60 if more >= 0 and 0 < over_s < 3 * RATE_OVER_S else None
    past = samples.before(partition, now - REUSE_OVER_S)
    if not past or None in (*past["reuse"].values(), *point["reuse"].values()):
        return dropped, None
    ideal, actual = (point["reuse"][name] - past["reuse"][name] for name in ("ideal", "actual"))
    return dropped, (ideal - actual) / ideal if ideal > 0 and actual >= 0 else None


def evaluate(partition: Partition, facts: Facts) -> list[Alert]:
    """Compares the findings of every enabled rule with the open alerts; returns those that fired or resolved."""
    moment = datetime.fromtimestamp(facts.now, timezone.get_current_timezone())
    settings = {row.rule: row for row in AlertSetting.objects.filter(partition=partition)}
    changed = []
    with transaction.atomic():
        open_now = {(a.rule, a.subject): a for a in Alert.objects.filter(partition=partition, resolved_at=None)}
        for rule in RULES:
            setting = settings.get(rule.name)
            for finding in _findings(rule, setting, facts):
                alert = open_now.pop((rule.name, finding.subject), None)
                alert = alert or Alert(partition=partition, rule=rule.name, subject=finding.subject, since=moment)
                if _renew(alert, rule, finding, moment):
                    changed.append(alert)
        changed += [alert for alert in open_now.values() if _end(alert, moment)]
    for alert in changed:
        silenced = settings.get(alert.rule)
        if not (silenced and silenced.silenced_until and silenced.silenced_until > moment):
            webhooks.tell("alert", document(alert))
    if changed:
        _announce(partition, changed)
    return changed


def _findings(rule: Rule, setting: AlertSetting | None, facts: Facts) -> list[Finding]:
    if setting is not None and not setting.enabled:
        return []
    # A silent gateway says nothing about anything else.
    if facts.snapshot is None and rule.name not in ("gateway-silent", "switch-stuck", "switch-failed", "key-expires"):
        return []
    return rule.check(facts, threshold_of(rule, setting) or 0.0)


def threshold_of(rule: Rule, setting: AlertSetting | None) -> float | None:
    return setting.threshold if setting is not None and setting.threshold is not None else rule.threshold


def _renew(alert: Alert, rule: Rule, finding: Finding, moment: datetime) -> bool:
    """True when it fires with this."""
    alert.severity, alert.summary, alert.value = rule.severity, finding.summary[:300], finding.value
    fires = alert.state == AlertState.PENDING and (moment - alert.since).total_seconds() >= rule.for_s
    if fires:
        alert.state, alert.fired_at = AlertState.FIRING, moment
    alert.save()
    return fires


def _end(alert: Alert, moment: datetime) -> bool:
    """True when it had fired; one that never did leaves no trace."""
    if alert.state == AlertState.PENDING:
        alert.delete()
        return False
    alert.state, alert.resolved_at = AlertState.RESOLVED, moment
    alert.save()
    return True


def _announce(partition: Partition, changed: list[Alert]) -> None:
    try:
        send_live_event(partition.name, "alert", alerts=[document(alert) for alert in changed])
    except Exception:  # Redis is away; the page reads the database.
        return


def document(alert: Alert) -> dict[str, Any]:
    """The alert as channels and browsers get it."""
    rule = BY_NAME.get(alert.rule)
    return {
        "partition": alert.partition.name,
        "rule": alert.rule,
        "title": rule.title if rule else alert.rule,
        "subject": alert.subject,
        "severity": alert.severity,
        "state": alert.state,
        "summary": alert.summary,
        "since": alert.since.timestamp(),
        "resolved_at": alert.resolved_at.timestamp() if alert.resolved_at else None,
        "do": rule.do if rule else "",
    }


# ---- what people do ----------------------------------------------------------------------------------------------


def acknowledge(alert: Alert, actor: Actor, note: str = "") -> Alert:
    """Says that someone looks after it. Raises Conflict for one that is over."""
    with change(actor, note, role="operator"):
        row = Alert.objects.select_for_update(of=("self",)).get(pk=alert.pk)
        if row.resolved_at is not None:
            raise Conflict("this alert is over", "alert-over")
        row.acknowledged_by, row.acknowledged_at, row.note = str(actor), timezone.now(), note[:500]
        row.save()
    return row


def alert_numbered(partition: Partition, number: int) -> Alert:
    """Raises NotFound."""
    found = Alert.objects.select_related("partition").filter(partition=partition, pk=number).first()
    if found is None:
        raise NotFound("alert", number)
    return found


def set_rule(partition: Partition, name: str, actor: Actor, reason: str = "", **changes: Any) -> AlertSetting:
    """Edits `enabled`, `threshold` (None: the rule's own), `silenced_until` of one rule. Raises NotFound, InvalidField."""
    rule = BY_NAME.get(name)
    if rule is None:
        raise NotFound("alert rule", name)
    threshold = changes.get("threshold")
    if threshold is not None and (rule.threshold is None or not 0 < threshold < 1e9):
        expected = "expected a number above 0 and below 1000000000" if rule.threshold else "this rule has none"
        raise InvalidField("threshold", expected)
    check_future("silenced_until", changes.get("silenced_until"))
    with change(actor, reason, role="operator"):
        setting, _ = AlertSetting.objects.get_or_create(partition=partition, rule=name)
        if records.apply(setting, changes, ("enabled", "threshold", "silenced_until")):
            setting.save()
    return setting
