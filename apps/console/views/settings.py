"""Settings of a partition: versions of the configuration with what each changed, limits, policies, channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods

from apps.console import exports
from apps.console.access import partition_view
from apps.console.forms import (
    ChannelEditForm,
    ChannelForm,
    ConfirmForm,
    FlowForm,
    LeaseForm,
    ObjectiveForm,
    PolicyForm,
    ReasonForm,
    RoutingForm,
)
from apps.console.views.actions import CHANGED, answer, posted
from apps.console.views.shell import page
from apps.flowcontrol import exchange
from apps.flowcontrol.models import Objective
from apps.flowcontrol.selectors import bands_of, flow_settings_of, objectives_of
from apps.flowcontrol.services import update_flow_settings, update_objective
from apps.planning.selectors import policy_of
from apps.planning.services import update_policy
from apps.telemetry import webhooks
from apps.telemetry.models import Channel, Delivery
from apps.topology.models import ConfigurationVersion, Partition
from apps.topology.services import update_partition
from controlplane.errors import SwitchyardError

form_view = require_http_methods(["GET", "POST"])
VERSIONS_SHOWN = 30
_SECRET = frozenset({"sha256"})


@partition_view("viewer")
def settings(request: HttpRequest, partition: Partition) -> HttpResponse:
    rows = ConfigurationVersion.objects.filter(partition=partition).defer("document").order_by("-version")
    context: dict[str, Any] = {
        "versions": list(rows[:VERSIONS_SHOWN]),
        "flow": flow_settings_of(partition),
        "policy": policy_of(partition),
        "objectives": list(objectives_of(partition)),
        "channels": list(Channel.objects.all()),
        "deliveries": list(Delivery.objects.select_related("channel")[:10]),
    }
    return page(request, partition, "settings", **context)


@partition_view("viewer")
def version(request: HttpRequest, partition: Partition, number: int) -> HttpResponse:
    """What a version changed against the one before, or against `?against=`; `?format=json` is the document itself."""
    found = {v.version: v for v in ConfigurationVersion.objects.filter(partition=partition, version=number)}
    if number not in found:
        raise Http404("There is no such version.")
    asked = request.GET.get("against", "")
    other = int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 10 else number - 1
    before = ConfigurationVersion.objects.filter(partition=partition, version=other).first()
    document = _redacted(found[number].document)
    if request.GET.get("format") == "json":
        return exports.json_response(f"{partition.name}-v{number}.json", document)
    old = _redacted(before.document) if before else {}
    context: dict[str, Any] = {
        "version": found[number],
        "against": before,
        "changes": list(differences(old, document)),
        "newest": ConfigurationVersion.objects.filter(partition=partition).order_by("-version").first(),
        "template": "console/version.html",
        "title": f"Configuration v{number}",
    }
    return page(request, partition, "settings", **context)


def differences(before: Any, after: Any) -> list[exchange.FieldChange]:
    ignored = ("version", "published_at")
    return [change for change in exchange.differences(_named(before), _named(after)) if change.path not in ignored]


def _named(document: Any) -> Any:
    """Lists whose items have an id instead of a name get one, so that they can be compared item by item."""
    if isinstance(document, dict):
        return {name: _named(value) for name, value in document.items()}
    if isinstance(document, list):
        if all(isinstance(item, dict) for item in document):
            return [{"name": item.get("id", i), **_named(item)} for i, item in enumerate(document)]
        return ", ".join(map(str, document))
    return document


def _redacted(document: Any) -> Any:
    """The document without digests of keys."""
    if isinstance(document, dict):
        return {name: "hidden" if name in _SECRET else _redacted(value) for name, value in document.items()}
    return [_redacted(item) for item in document] if isinstance(document, list) else document


@partition_view("operator")
@form_view
def revert(request: HttpRequest, partition: Partition, number: int) -> HttpResponse:
    if not ConfigurationVersion.objects.filter(partition=partition, version=number).exists():
        raise Http404("There is no such version.")
    form = ConfirmForm(partition.name, posted(request), prefix="revert")

    def write() -> str:
        done = exchange.revert(partition, number, request.actor, form.reason_given)  # type: ignore[attr-defined]
        if not done.changes:
            return f"Bands, objectives and limits are as in version {number} already."
        return f"Back to version {number}, as version {done.version}; {len(done.changes)} values changed."

    return answer(
        request, form, write, slot="settings-slot", title=f"Revert to version {number}", submit=f"Revert to v{number}",
        about="Sets bands, objectives, limits and gates back to what they were then. Nodes, keys and tenants stay as they "
        "are. It becomes a new version.", danger=True,
    )  # fmt: skip


@partition_view("operator")
@form_view
def flow(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = FlowForm(flow_settings_of(partition), posted(request), prefix="flow")
    return _edit(
        request, form, lambda: update_flow_settings(partition, request.actor, form.reason_given, **form.changes()),  # type: ignore[attr-defined]
        "Limits and gates",
    )  # fmt: skip


@partition_view("operator")
@form_view
def objective(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    row = Objective.objects.select_related("partition", "band").filter(partition=partition, name=name).first()
    if row is None:
        raise Http404("There is no such objective.")
    bands = {band.name: band for band in bands_of(partition)}
    form = ObjectiveForm(row, list(bands), posted(request))

    def save() -> Any:
        changes = form.changes()
        if "band_name" in changes:
            changes["band"] = bands[changes.pop("band_name")]
        return update_objective(row, request.actor, form.reason_given, **changes)  # type: ignore[attr-defined]

    return _edit(request, form, save, f"Objective {name}")


@partition_view("administrator")
@form_view
def policy(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = PolicyForm(policy_of(partition), posted(request), prefix="policy")
    return _edit(
        request, form, lambda: update_policy(partition, request.actor, form.reason_given, **form.changes()),  # type: ignore[attr-defined]
        "Planner policy",
    )  # fmt: skip


@partition_view("administrator")
@form_view
def routing(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = RoutingForm(partition, posted(request), prefix="routing")
    return _edit(
        request, form, lambda: update_partition(partition, request.actor, form.reason_given, **form.changes()),  # type: ignore[attr-defined]
        "Routing",
    )  # fmt: skip


@partition_view("administrator")
@form_view
def lease(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = LeaseForm(partition, posted(request))

    def save() -> Any:
        return update_partition(
            partition, request.actor, form.reason_given, lease={**partition.lease, **form.changes()}  # type: ignore[attr-defined]
        )  # fmt: skip

    return _edit(request, form, save, "Leases of branches")


def _edit(request: HttpRequest, form: Any, save: Callable[[], Any], title: str) -> HttpResponse:
    def write() -> str:
        if not form.changes():
            return f"{title}: nothing was changed."
        save()
        return f"{title}: saved and sent to the gateway."

    return answer(request, form, write, slot="settings-slot", title=title, submit="Save")


# -- channels --------------------------------------------------------------------------------------------------------


def _channel(name: str) -> Channel:
    found = Channel.objects.filter(name=name).first()
    if found is None:
        raise Http404("There is no such channel.")
    return found


@partition_view("administrator")
@form_view
def add_channel(request: HttpRequest, partition: Partition) -> HttpResponse:
    form = ChannelForm(posted(request), prefix="channel")
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            made = webhooks.create_channel(data["name"], data["url"], request.actor, form.reason_given, data["kinds"])  # type: ignore[attr-defined]
        except SwitchyardError as error:
            form.refuse(error)
        else:
            return _secret_shown(request, made)
    return _secret_form(
        request, form, title="New channel", submit="Create the channel",
        about="Gets signed JSON by HTTP POST. The secret it is signed with is shown once.",
    )  # fmt: skip


def _secret_shown(request: HttpRequest, made: webhooks.NewChannel) -> HttpResponse:
    response = render(request, "console/_channel_shown.html", {"made": made})
    response["Cache-Control"], response["HX-Trigger"] = "no-store", CHANGED
    return response


def _secret_form(request: HttpRequest, form: Any, **words: Any) -> HttpResponse:
    context = {"form": form, "slot": "channel-slot", "action": request.get_full_path(), **words}
    return render(request, "console/_action_form.html", context, status=422 if request.method == "POST" else 200)


@partition_view("administrator")
@form_view
def rotate_channel(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    channel = _channel(name)
    form = ConfirmForm(name, posted(request), prefix="rotate-channel")
    if request.method == "POST" and form.is_valid():
        try:
            return _secret_shown(request, webhooks.rotate_secret(channel, request.actor, form.reason_given))  # type: ignore[attr-defined]
        except SwitchyardError as error:
            form.refuse(error)
    return _secret_form(
        request, form, title=f"New secret for {name}", submit="Make a new secret", danger=True,
        about="From the next message on only the new one signs; the receiver refuses them until it knows it.",
    )  # fmt: skip


@partition_view("administrator")
@form_view
def edit_channel(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    channel = _channel(name)
    form = ChannelEditForm(channel, posted(request), prefix="edit-channel")

    def write() -> str:
        if not form.changes():
            return f"Channel {name}: nothing was changed."
        webhooks.update_channel(channel, request.actor, form.reason_given, **form.changes())  # type: ignore[attr-defined]
        return f"Channel {name} is saved."

    return answer(request, form, write, slot="channel-slot", title=f"Edit {name}", submit="Save the channel")


@partition_view("administrator")
@form_view
def test_channel(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    channel = _channel(name)
    form = ReasonForm(posted(request), prefix="test-channel")

    def write() -> str:
        return f"{name}: {webhooks.test_channel(channel, request.actor)}."  # type: ignore[attr-defined]

    return answer(request, form, write, slot="channel-slot", title=f"Test {name}", submit="Send a test message")


@partition_view("administrator")
@form_view
def toggle_channel(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    channel = _channel(name)
    form = ReasonForm(posted(request), prefix="toggle-channel")
    verb = "Pause" if channel.enabled else "Resume"

    def write() -> str:
        webhooks.update_channel(channel, request.actor, form.reason_given, enabled=not channel.enabled)  # type: ignore[attr-defined]
        return f"Channel {name} is {'paused' if channel.enabled else 'told again'}."

    return answer(request, form, write, slot="channel-slot", title=f"{verb} {name}", submit=f"{verb} the channel")


@partition_view("administrator")
@form_view
def remove_channel(request: HttpRequest, partition: Partition, name: str) -> HttpResponse:
    channel = _channel(name)
    form = ConfirmForm(name, posted(request), prefix="remove-channel")

    def write() -> str:
        webhooks.delete_channel(channel, request.actor, form.reason_given)  # type: ignore[attr-defined]
        return f"Channel {name} is gone."

    return answer(
        request, form, write, slot="channel-slot", title=f"Remove {name}", submit="Remove the channel", danger=True
    )
