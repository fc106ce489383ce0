"""`/metrics` of the control plane for Prometheus: what it decided and what is wrong. Gateways and nodes have their own.

Wants a control-plane key with the role viewer as `Authorization: Bearer`, or a viewer's session.
"""

from __future__ import annotations

from collections.abc import Iterable

from django.db.models import Count, Max
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from apps.planning.choices import Mode, ProposalState
from apps.planning.models import PlannerPolicy, Proposal, SwitchOrder
from apps.telemetry.choices import AlertState
from apps.telemetry.models import Alert, Delivery, LoadWindow
from apps.topology.models import ConfigurationVersion, Node
from controlplane.permissions import Forbidden, NotAuthenticated, require
from controlplane.rest.auth import authenticate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@require_GET
def metrics(request: HttpRequest) -> HttpResponse:
    try:
        actor = authenticate(request)
        if actor is None:
            raise NotAuthenticated("send a control-plane key with the role viewer")
        require(actor, "viewer")
    except (NotAuthenticated, Forbidden) as error:
        status = 401 if isinstance(error, NotAuthenticated) else 403
        response = HttpResponse(f"{error}\n", status=status, content_type="text/plain")
        if status == 401:
            response["WWW-Authenticate"] = "Bearer"
        return response
    registry = CollectorRegistry()
    registry.register(_Rows())
    return HttpResponse(generate_latest(registry), content_type=CONTENT_TYPE)


class _Rows:
    """Gauges read from the database when somebody scrapes."""

    def collect(self) -> Iterable[Metric]:
        yield from (_nodes(), _alerts(), _orders(), _proposals(), _modes(), _versions(), _telemetry(), _deliveries())


def _gauge(name: str, about: str, labels: list[str], rows: Iterable[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(f"switchyard_{name}", about, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _nodes() -> Metric:
    rows = Node.objects.filter(enabled=True).values_list("partition__name", "desired_phase").order_by()
    counted = rows.annotate(n=Count("pk"))
    about = "Enabled nodes by the phase they are meant to have."
    return _gauge("split_nodes", about, ["partition", "phase"], (([p, phase], n) for p, phase, n in counted))


def _alerts() -> Metric:
    rows = Alert.objects.filter(state=AlertState.FIRING).values_list("partition__name", "rule", "severity").order_by()
    counted = rows.annotate(n=Count("pk"))
    labels = ["partition", "rule", "severity"]
    return _gauge(
        "alerts_firing", "Alerts that fire in the console.", labels, (([p, r, s], n) for p, r, s, n in counted)
    )


def _orders() -> Metric:
    rows = SwitchOrder.objects.values_list("partition__name", "state").order_by().annotate(n=Count("pk"))
    return _gauge("switch_orders", "Switch orders by state.", ["partition", "state"], (([p, s], n) for p, s, n in rows))


def _proposals() -> Metric:
    rows = Proposal.objects.filter(state=ProposalState.OPEN).values_list("partition__name").order_by()
    counted = rows.annotate(n=Count("pk"))
    return _gauge("proposals_open", "Proposals that wait for a person.", ["partition"], (([p], n) for p, n in counted))


def _modes() -> Metric:
    rows = PlannerPolicy.objects.values_list("partition__name", "mode")
    about = "1 for the mode in which the planner decides."
    pairs = (([name, mode], float(mode == chosen)) for name, chosen in rows for mode in Mode.values)
    return _gauge("planner_mode", about, ["partition", "mode"], pairs)


def _versions() -> Metric:
    rows = ConfigurationVersion.objects.values_list("partition__name").order_by().annotate(n=Max("version"))
    about = "Newest published version of the configuration."
    return _gauge("configuration_version", about, ["partition"], (([p], n) for p, n in rows))


def _telemetry() -> Metric:
    rows = LoadWindow.objects.values_list("partition__name").order_by().annotate(n=Max("t1"))
    about = "Unix time up to which the planner knows the load."
    return _gauge("telemetry_until_seconds", about, ["partition"], (([p], n) for p, n in rows))


def _deliveries() -> Metric:
    rows = Delivery.objects.filter(delivered_at=None, given_up_at=None).values_list("channel__name").order_by()
    counted = rows.annotate(n=Count("pk"))
    return _gauge("webhooks_waiting", "Messages not delivered yet.", ["channel"], (([c], n) for c, n in counted))
