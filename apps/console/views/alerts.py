"""Alerts: what fires, what it means, what to do; and the rules behind them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from apps.console.access import partition_view
from apps.console.forms import ReasonForm, RuleForm, SilenceForm
from apps.console.views.actions import answer, posted
from apps.console.views.shell import abilities, page
from apps.telemetry import alerting
from apps.telemetry.choices import AlertState, Severity
from apps.telemetry.models import Alert, AlertSetting
from apps.telemetry.rules import BY_NAME, RULES, Rule
from apps.topology.models import Partition
from controlplane.errors import NotFound

form_view = require_http_methods(["GET", "POST"])
HISTORY_SHOWN = 50
_ORDER = [severity.value for severity in Severity]


@partition_view("viewer")
def alerts(request: HttpRequest, partition: Partition) -> HttpResponse:
    return page(request, partition, "alerts", **_state(partition))


@partition_view("viewer")
def state(request: HttpRequest, partition: Partition) -> HttpResponse:
    """The part of the page that changes."""
    context = {"partition": partition} | _state(partition) | abilities(request)
    return render(request, "console/_alerts_state.html", context)


def _state(partition: Partition) -> dict[str, Any]:
    rows = Alert.objects.filter(partition=partition)
    firing = [_shown(alert, partition) for alert in rows.filter(state=AlertState.FIRING)]
    firing.sort(key=lambda row: (row["acknowledged"], _ORDER.index(row["alert"].severity)))
    settings = {row.rule: row for row in AlertSetting.objects.filter(partition=partition)}
    return {
        "unwatched": alerting.unwatched_since(partition, time.time()),
        "firing": firing,
        "pending": [_shown(alert, partition) for alert in rows.filter(state=AlertState.PENDING)],
        "resolved": [_shown(a, partition) for a in rows.filter(state=AlertState.RESOLVED)[:HISTORY_SHOWN]],
        "rules": [_rule(rule, settings.get(rule.name)) for rule in RULES],
    }


def _shown(alert: Alert, partition: Partition) -> dict[str, Any]:
    rule = BY_NAME.get(alert.rule)
    ended = alert.resolved_at or timezone.now()
    return {
        "alert": alert,
        "title": rule.title if rule else alert.rule,
        "rule": rule,
        "tone": Severity(alert.severity).tone,
        "acknowledged": bool(alert.acknowledged_at),
        "url": reverse(rule.page, args=[partition.name]) if rule else "",
        "page": rule.page if rule else "",
        "lasted_s": (ended - alert.since).total_seconds(),
    }


def _rule(rule: Rule, setting: AlertSetting | None) -> dict[str, Any]:
    silenced = setting.silenced_until if setting else None
    return {
        "rule": rule,
        "tone": rule.severity.tone,
        "threshold": alerting.threshold_of(rule, setting),
        "own": setting is not None and setting.threshold is not None,
        "enabled": setting is None or setting.enabled,
        "silenced": silenced if silenced and silenced > timezone.now() else None,
    }


@partition_view("operator")
@form_view
def acknowledge(request: HttpRequest, partition: Partition, number: int) -> HttpResponse:
    try:
        alert = alerting.alert_numbered(partition, number)
    except NotFound as error:
        raise Http404(error.message) from None
    form = ReasonForm(posted(request), prefix="acknowledge")
    form.fields["reason"].label, form.fields["reason"].help_text = "Note", "What you are about to do; others see it."

    def write() -> str:
        alerting.acknowledge(alert, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return "It is yours. It ends by itself once its cause is gone."

    return answer(
        request, form, write, slot=f"alert-{number}-slot", title="Take this alert on", submit="I look after it"
    )


def _known(name: str) -> Rule:
    rule = BY_NAME.get(name)
    if rule is None:
        raise Http404("There is no such rule.")
    return rule


@partition_view("operator")
@form_view
def rule(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    known = _known(name)
    setting = AlertSetting.objects.filter(partition=partition, rule=name).first()
    form = RuleForm(known, setting, posted(request))

    def write() -> str:
        alerting.set_rule(partition, name, request.actor, form.reason_given, **form.changes())  # type: ignore[attr-defined]
        return f"Rule {known.title} is saved."

    return answer(request, form, write, slot="rule-slot", title=f"Edit {known.title}", submit="Save the rule")


@partition_view("operator")
@form_view
def silence(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    known = _known(name)
    form = SilenceForm(posted(request), prefix=f"silence-{name}")

    def write() -> str:
        until = form.until or timezone.now() + timedelta(days=3650)
        alerting.set_rule(partition, name, request.actor, form.reason_given, silenced_until=until)  # type: ignore[attr-defined]
        return f"{known.title} tells no channel for now; the console still shows it."

    return answer(
        request, form, write, slot="rule-slot", title=f"Silence {known.title}", submit="Silence it",
        about="Channels are not told. The alert itself is still raised and shown here.",
    )  # fmt: skip
