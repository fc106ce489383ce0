"""One vote per person: whatever key it comes through, and whoever else knows that key."""

from datetime import timedelta

import pytest
from django.utils import timezone

from apps.planning import selectors, services
from apps.planning.models import SwitchOrder, Vote
from apps.tenancy import services as tenancy
from apps.tenancy.models import Tenant
from apps.tenancy.selectors import key_actor, live_key
from controlplane import audit_trail
from controlplane.actors import PLANNER, SYSTEM, Actor
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from tests.factories import make_tenant, make_user

pytestmark = pytest.mark.django_db


@pytest.fixture
def people(partition):
    """Ada administers, Bob and Cyd operate; all of them are users."""
    make_tenant("acme")
    roles = {"ada": "administrator", "bob": "operator", "cyd": "operator"}
    return {name: Actor.person(make_user(name, role)) for name, role in roles.items()}


def key_of(issuer, owner, name="laptop", role="operator"):
    """The actor of a new key of Acme, as REST makes it from the key's text."""
    issued = tenancy.issue_key(Tenant.objects.get(name="acme"), name, issuer, role=role, owner=owner)
    return issued.key, key_actor(live_key(issued.plain_text))


def proposed(partition, actor=PLANNER):
    return services.propose(partition, 3, actor, "more prompts", timezone.now() + timedelta(minutes=5))


def test_a_person_with_a_key_has_one_vote(partition, people):
    services.update_policy(partition, people["ada"], approvals_required=2)
    proposal = services.approve(proposed(partition), people["bob"])
    _, key = key_of(SYSTEM, "bob")
    with pytest.raises(Conflict, match="bob, whose key acme/laptop is, has voted"):
        services.approve(proposal, key)
    with pytest.raises(Conflict, match="has voted"):
        services.reject(proposal, key, "on second thought")
    assert SwitchOrder.objects.count() == 0
    assert services.approve(proposal, people["cyd"]).state == "approved"


def test_two_keys_of_one_person_have_one_vote(partition, people):
    services.update_policy(partition, people["ada"], approvals_required=2)
    (_, one), (_, other) = key_of(SYSTEM, "bob", "one"), key_of(SYSTEM, "bob", "other")
    proposal = services.approve(proposed(partition), one)
    for again in (other, people["bob"]):
        with pytest.raises(Conflict, match="has voted"):
            services.approve(proposal, again)


def test_nobody_approves_their_own_proposal_through_a_key_or_what_they_proposed_through_one(partition, people):
    _, key = key_of(SYSTEM, "bob")
    proposal = proposed(partition, people["bob"])
    with pytest.raises(Forbidden, match="bob, whose key acme/laptop is, made this proposal"):
        services.approve(proposal, key)
    services.reject(proposal, people["bob"], "withdrawn")
    proposal = proposed(partition, key)
    with pytest.raises(Forbidden, match="bob made this proposal"):
        services.approve(proposal, people["bob"])
    assert services.approve(proposal, people["cyd"]).state == "approved"


def test_who_issued_a_key_for_another_cannot_vote_twice_or_for_their_own_proposal_through_it(partition, people):
    services.update_policy(partition, people["ada"], approvals_required=2)
    _, key = key_of(people["ada"], "bob")
    proposal = services.approve(proposed(partition), people["ada"])
    with pytest.raises(Conflict, match="ada, who issued acme/laptop, has voted"):
        services.approve(proposal, key)
    services.reject(proposal, people["cyd"], "no")
    with pytest.raises(Forbidden, match="ada, who issued acme/laptop, made this proposal"):
        services.approve(proposed(partition, people["ada"]), key)


def test_a_key_that_its_owner_rotated_is_known_to_nobody_else(partition, people):
    services.update_policy(partition, people["ada"], approvals_required=2)
    row, old = key_of(people["ada"], "bob")
    with pytest.raises(Forbidden):  # Ada knows its text: through it she could make herself another Bob
        tenancy.rotate_key(row, old)
    key = key_actor(live_key(tenancy.rotate_key(row, people["bob"], "mine alone").plain_text))
    assert key.people == {"bob"}
    proposal = services.approve(proposed(partition), people["ada"])
    assert services.approve(proposal, key).state == "approved"


def test_a_key_issued_through_another_is_known_to_all_who_know_that_one(partition, people):
    make_user("dan", "administrator")
    _, admin_key = key_of(people["ada"], "dan", "first", role="administrator")
    row, key = key_of(admin_key, "cyd", "second")
    assert row.known_to == ["ada", "dan"]
    assert key.people == {"ada", "cyd", "dan"}


def test_a_key_that_is_nobodys_proposes_but_does_not_vote(partition, people):
    _, key = key_of(people["ada"], None)
    proposal = proposed(partition, key)
    for vote in (lambda: services.approve(proposal, key), lambda: services.reject(proposal, key, "no")):
        with pytest.raises(Forbidden, match="belongs to no person and has no vote"):
            vote()
    with pytest.raises(Forbidden, match="ada made this proposal"):  # she issued it, so it may be hers
        services.approve(proposal, people["ada"])
    assert services.approve(proposal, people["bob"]).state == "approved"


def test_neither_the_planner_nor_the_system_votes(partition):
    proposal = proposed(partition)
    for actor in (PLANNER, SYSTEM):
        with pytest.raises(Forbidden, match="no person"):
            services.approve(proposal, actor)


def test_votes_proposals_and_the_trail_show_the_person_and_the_key(partition, people):
    _, key = key_of(SYSTEM, "bob")
    proposal = proposed(partition, key)
    services.reject(proposal, key, "withdrawn")
    shown = selectors.proposal_document(proposal)
    assert (shown["proposed_by"], shown["proposer"]) == ("key:acme/laptop", "bob")
    assert [(v["actor"], v["person"]) for v in shown["votes"]] == [("key:acme/laptop", "bob")]
    assert Vote.objects.get().user.username == "bob"
    entries, _ = audit_trail.trail(partition, audit_trail.Narrow(table="vote", actor="bob"))
    assert [(entry.actor, entry.actor_kind, entry.person) for entry in entries] == [("acme/laptop", "key", "bob")]


def test_a_key_can_do_no_more_than_its_owner(partition, people):
    with pytest.raises(InvalidField, match="the role administrator, which bob does not have"):
        key_of(people["ada"], "bob", role="administrator")
    with pytest.raises(InvalidField, match="not a user"):
        key_of(people["ada"], "nobody")
    issued = tenancy.issue_key(Tenant.objects.get(), "l", SYSTEM, role="operator", owner="bob")
    bob = people["bob"].user
    bob.groups.clear()
    assert key_actor(live_key(issued.plain_text)).roles == frozenset()
    bob.is_active = False
    bob.save()
    assert live_key(issued.plain_text) is None
