"""Who may watch and change what on the console's pages; the rules themselves are `controlplane.permissions`.

A tenant user sees the own tenants and nothing else: a page opens to one only where its view says `tenants=True`, and then
`request.scope` holds the names of those tenants (None for everybody else, who sees all).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol

from django.contrib.auth import get_user_model
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse

from apps.planning.models import PlannerPolicy
from apps.topology.models import Partition
from controlplane import permissions
from controlplane.actors import Actor

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser, User
    from django.contrib.sessions.backends.base import SessionBase

Scope = frozenset[str] | None


class PartitionView(Protocol):
    def __call__(self, request: HttpRequest, partition: Partition, **kwargs: Any) -> HttpResponse: ...


def scope_of(actor: Actor) -> Scope:
    """The tenants an actor may see: None is all of them."""
    return None if permissions.has_role(actor, "viewer") else actor.tenants


def partition_view(role: str, *, tenants: bool = False) -> Any:
    """Decorator of a view of one partition: signed in, holding `role`, and the partition exists; else sign-in, 403, 404.

    The view gets the `Partition` in place of its name, `request.actor`, and `request.scope`. With `tenants` a tenant user
    may use it too, whatever `role` says.
    """

    def decorate(view: PartitionView) -> Any:
        @login_required
        @wraps(view)
        def checked(request: HttpRequest, partition: str, **kwargs: Any) -> HttpResponse:
            actor = permissions.actor_of(request)
            if not (tenants and permissions.has_role(actor, "tenant")):
                permissions.require(actor, role)
            request.actor = actor  # type: ignore[attr-defined]
            request.scope = scope_of(actor)  # type: ignore[attr-defined]
            found = Partition.objects.select_related("cluster").filter(name=partition).first()
            if found is None:
                raise Http404(f"There is no partition called “{partition[:80]}”.")
            return view(request, found, **kwargs)

        checked.needs_role = role  # type: ignore[attr-defined]
        checked.opens_to_tenants = tenants  # type: ignore[attr-defined]
        return checked

    return decorate


def slo_ttft_s(partition: Partition) -> float | None:
    """The planner policy's TTFT target in seconds, None when the partition has no policy yet."""
    return PlannerPolicy.objects.filter(partition=partition).values_list("slo_ttft_s", flat=True).first()


@dataclass(frozen=True, slots=True)
class Watch:
    """Whether a user may watch a partition, and what the frames need to know about it. `scope` as of `scope_of`."""

    refused: Literal["", "signed-out", "forbidden", "unknown"]
    slo_ttft_s: float | None = None
    scope: Scope = None


def watchable_partition(user: User | AnonymousUser, name: str) -> Watch:
    """May this signed-in user watch the partition called `name`? Reads the database."""
    actor = Actor.person(user)
    if not permissions.has_role(actor, "viewer") and not permissions.has_role(actor, "tenant"):
        return Watch("forbidden")
    partition = Partition.objects.filter(name=name).first()
    if partition is None:
        return Watch("unknown")
    return Watch("", slo_ttft_s(partition), scope_of(actor))


def watchable_now(user: User, session: SessionBase | None, name: str) -> Watch:
    """`watchable_partition` for somebody who signed in a while ago: refused once the account is closed, its password is
    another, or the session has ended.
    """
    fresh = get_user_model().objects.filter(pk=user.pk, is_active=True).first()
    if fresh is None or fresh.get_session_auth_hash() != user.get_session_auth_hash():
        return Watch("signed-out")
    if session is not None and session.session_key and not session.exists(session.session_key):
        return Watch("signed-out")
    return watchable_partition(fresh, name)
