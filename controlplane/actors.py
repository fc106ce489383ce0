"""Who does something: every service that writes takes an `Actor` and a reason, and both end in the audit trail."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from django.contrib.auth.models import AnonymousUser, User

ActorKind = Literal["person", "key", "planner", "system"]


@dataclass(frozen=True, slots=True)
class Actor:
    """A person, an API key, the planner or the system itself.

    `roles` holds names of `controlplane.permissions.Role`; `tenants` the names of the tenants a tenant user belongs to;
    `request_id` leads from the audit trail back to the HTTP request (empty outside of one). Of a key, `user` is the person
    it belongs to (None: a service's), and `known_to` names who issued it and so has seen its text.
    """

    kind: ActorKind
    name: str
    user: User | None = None
    roles: frozenset[str] = frozenset()
    tenants: frozenset[str] = frozenset()
    request_id: str = ""
    known_to: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name if self.kind == "person" else f"{self.kind}:{self.name}"

    @property
    def voice(self) -> str:
        """The name of the person whose vote this actor's vote is; empty for the planner, the system and a service's key."""
        if self.kind == "person":
            return self.name
        return self.user.get_username() if self.kind == "key" and self.user is not None else ""

    @property
    def people(self) -> frozenset[str]:
        """Names of everyone who can have acted here: a key speaks for its owner, but who issued it knows its text too."""
        return self.known_to | ({self.voice} if self.voice else set())

    def during(self, request_id: str) -> Actor:
        """The same actor, acting within one HTTP request."""
        return replace(self, request_id=request_id)

    @classmethod
    def person(cls, user: User | AnonymousUser) -> Actor:
        """The actor of a logged-in user; its roles are the user's groups, and a superuser is an administrator."""
        if not user.is_authenticated:
            raise ValueError("an anonymous visitor is not an actor")
        roles = set(user.groups.values_list("name", flat=True))
        if user.is_superuser:
            roles.add("administrator")
        memberships: Any = user.memberships  # type: ignore[union-attr]
        tenants = frozenset(memberships.values_list("tenant__name", flat=True))
        return cls("person", user.get_username(), user, frozenset(roles), tenants)  # type: ignore[arg-type]


PLANNER = Actor("planner", "planner", roles=frozenset({"administrator"}))
SYSTEM = Actor("system", "switchyard", roles=frozenset({"administrator"}))
