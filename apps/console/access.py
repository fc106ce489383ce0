"""Who may watch and change what on the console's pages; the rules themselves are `controlplane.permissions`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse

from apps.planning.models import PlannerPolicy
from apps.topology.models import Partition
from controlplane import permissions
from controlplane.actors import Actor

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser, User


class PartitionView(Protocol):
    def __call__(self, request: HttpRequest, partition: Partition, **kwargs: Any) -> HttpResponse: ...


def partition_view(role: str) -> Any:
    """Decorator of a view of one partition: signed in, holding `role`, and the partition exists; else sign-in, 403, 404.

    The view gets the `Partition` in place of its name, and `request.actor`.
    """

    def decorate(view: PartitionView) -> Any:
        @login_required
        @wraps(view)
        def checked(request: HttpRequest, partition: str, **kwargs: Any) -> HttpResponse:
            request.actor = permissions.require(request, role)  # type: ignore[attr-defined]
            found = Partition.objects.select_related("cluster").filter(name=partition).first()
            if found is None:
                raise Http404(f"There is no partition called “{partition[:80]}”.")
            return view(request, found, **kwargs)

        return checked

    return decorate


def slo_ttft_s(partition: Partition) -> float | None:
    """The planner policy's TTFT target in seconds, None when the partition has no policy yet."""
    return PlannerPolicy.objects.filter(partition=partition).values_list("slo_ttft_s", flat=True).first()


@dataclass(frozen=True, slots=True)
class Watch:
    """Whether a user may watch a partition, and what the frames need to know about it."""

    refused: Literal["", "forbidden", "unknown"]
    slo_ttft_s: float | None = None


def watchable_partition(user: User | AnonymousUser, name: str) -> Watch:
    """May this signed-in user watch the partition called `name`? Reads the database."""
    if not permissions.has_role(Actor.person(user), "viewer"):
        return Watch("forbidden")
    partition = Partition.objects.filter(name=name).first()
    if partition is None:
        return Watch("unknown")
    return Watch("", slo_ttft_s(partition))
