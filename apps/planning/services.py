"""What people do about the split: policy, votes on proposals, force, freeze, roll back. The planner's own writes are in
`windows.py`, the driving of orders in `orders.py`.

Every service takes an actor and a reason, checks the actor's role, is audited, and tells the partition's browsers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from django.utils import timezone

from apps.planning import dryruns, orders, warmups
from apps.planning.choices import Cause, Mode, OrderState, ProposalState, VoteChoice
from apps.planning.domain.phase_machine import ACTIVE
from apps.planning.models import ForcedSplit, PlannerPolicy, Proposal, SwitchOrder, Vote
from apps.planning.selectors import desired_split, forced_phases, live_forces, policy_document, policy_of
from apps.topology import configuration
from apps.topology.models import Node, Partition
from apps.topology.selectors import nodes_of
from controlplane import records
from controlplane.actors import SYSTEM, Actor
from controlplane.audit import change
from controlplane.errors import Conflict, InvalidField
from controlplane.permissions import Forbidden
from controlplane.validators import check_future

_POLICY_FIELDS = frozenset(
    {
        "slice_s",
        "slices_per_window",
        "cooldown_s",
        "drain_deadline_s",
        "slo_ttft_s",
        "max_stale_ratio",
        "min_utilisation",
        "approvals_required",
        "self_approval",
        "auto_warm_up",
        "warm_up_rung_s",
        "warm_up_limit_s",
    }
)


# -- policy ----------------------------------------------------------------------------------------------------------


def update_policy(partition: Partition, actor: Actor, reason: str = "", **changes: Any) -> PlannerPolicy:
    """Edit windows, cooldown, deadlines, SLO and approvals. Administrator. Raises InvalidField."""
    with change(actor, reason, role="administrator"):
        policy = _locked_policy(partition)
        if records.apply(policy, changes, _POLICY_FIELDS):
            _check_warm_up(policy, changes)
            policy.save()
            orders.tell(partition.name, "policy", policy=_plain_policy(policy))
            if "slo_ttft_s" in changes:  # the gateway judges by it
                configuration.publish(partition, actor, reason)
    return policy


def _check_warm_up(policy: PlannerPolicy, changes: Mapping[str, Any]) -> None:
    """Raises InvalidField, by the field that was edited, for a warm-up that could never learn anything."""
    edited = [name for name in ("warm_up_rung_s", "warm_up_limit_s") if name in changes]
    short = warmups.too_short(policy.partition, policy) if edited else None
    if short:
        wanted = "expected shorter rungs" if edited == ["warm_up_rung_s"] else "expected a longer time"
        raise InvalidField(edited[-1], f"{wanted}: {short}")


def set_mode(partition: Partition, mode: str, actor: Actor, reason: str) -> PlannerPolicy:
    """Who decides from now on. Administrator. `frozen` is a freeze without an end; any other mode ends a freeze."""
    if mode not in Mode.values:
        raise InvalidField("mode", f"expected one of {', '.join(Mode.values)}")
    if mode == Mode.FROZEN:
        return freeze(partition, actor, reason, None)
    with change(actor, reason, role="administrator"):
        policy = _locked_policy(partition)
        policy.mode = policy.thaw_mode = mode
        _thaw(policy)
        policy.save()
        _say(partition, policy, actor, reason)
    return policy


def freeze(partition: Partition, actor: Actor, reason: str, until: datetime | None) -> PlannerPolicy:
    """No change of the split by the planner until `until` (None: until unfrozen). Administrator; needs a reason."""
    check_future("until", until)
    with change(actor, reason, role="administrator", needs_reason=True):
        policy = _locked_policy(partition)
        if policy.mode != Mode.FROZEN:
            policy.thaw_mode, policy.mode = policy.mode, Mode.FROZEN.value
        policy.frozen_until, policy.freeze_reason, policy.frozen_by = until, reason.strip(), str(actor)
        policy.save()
        _say(partition, policy, actor, reason)
    return policy


def unfreeze(partition: Partition, actor: Actor, reason: str) -> PlannerPolicy:
    """Back to the mode before the freeze. Administrator. Raises Conflict when nothing is frozen."""
    with change(actor, reason, role="administrator"):
        policy = _locked_policy(partition)
        if policy.mode != Mode.FROZEN:
            raise Conflict(f"the split of {partition.name} is not frozen", "not-frozen")
        policy.mode = policy.thaw_mode
        _thaw(policy)
        policy.save()
        _say(partition, policy, actor, reason)
    return policy


def forget_node(node: Node, actor: Actor, reason: str = "") -> None:
    """Takes a node that is out of service (`enabled` false) out of the records. Its past keeps its name. Administrator.

    Raises Conflict while it is in service, moves in a switch, is forced, or is the partition's only one.
    """
    with change(actor, reason, role="administrator"):
        partition = records.locked(node.partition)
        row = records.locked(node)
        if row.enabled:
            raise Conflict(f"{row.name} is in service; disable it first (enabled: false)", "node-in-service")
        if SwitchOrder.objects.filter(partition=partition, state__in=ACTIVE, steps__node=row.name).exists():
            raise Conflict(f"a switch that moves {row.name} is under way", "switch-running")
        if row.name in forced_phases(partition):
            raise Conflict(f"{row.name} is forced; clear the force first", "forced")
        if not nodes_of(partition).exclude(pk=row.pk).exists():
            raise Conflict(f"{row.name} is the only node of {partition.name}", "last-node")
        row.delete()
        configuration.publish(partition, actor, reason or f"node {row.name} removed")


def _locked_policy(partition: Partition) -> PlannerPolicy:
    """The partition first, as everywhere: a freeze waits for the planner's tick, and the next tick sees it."""
    records.locked(partition)
    PlannerPolicy.objects.get_or_create(partition=partition)
    return PlannerPolicy.objects.select_for_update(of=("self",)).get(partition=partition)


def _thaw(policy: PlannerPolicy) -> None:
    policy.frozen_until, policy.freeze_reason, policy.frozen_by = None, "", ""


def _plain_policy(policy: PlannerPolicy) -> dict[str, Any]:
    document = policy_document(policy)
    until = document["frozen_until"]
    return {**document, "frozen_until": until.timestamp() if until else None}


def _say(partition: Partition, policy: PlannerPolicy, actor: Actor, reason: str) -> None:
    orders.tell(partition.name, "policy", policy=_plain_policy(policy), actor=str(actor), reason=reason)


# -- proposals -------------------------------------------------------------------------------------------------------


def propose(
    partition: Partition, prefill_nodes: int | Sequence[str], actor: Actor, reason: str, expires_at: datetime
) -> Proposal:
    """A person's own proposal, to be approved by another. Operator; needs a reason. Raises Conflict when one is open."""
    check_future("expires_at", expires_at)
    with change(actor, reason, role="operator", needs_reason=True):
        records.locked(partition)
        nodes = list(nodes_of(partition))
        targets = orders.split_targets(nodes, prefill_nodes)
        orders.check_targets({node.name: node for node in nodes}, targets)
        now, after = desired_split(nodes), desired_split(nodes, targets)
        if now == after:
            raise Conflict("this is the present split", "no-change")
        if Proposal.objects.filter(partition=partition, state=ProposalState.OPEN).exists():
            raise Conflict("another proposal is open; decide about it first", "proposal-open")
        proposal = Proposal.objects.create(
            partition=partition,
            prefill=after["prefill"],
            decode=after["decode"],
            from_prefill=now["prefill"],
            from_decode=now["decode"],
            reason=reason,
            proposed_by=str(actor),
            proposer=actor.voice,
            people=sorted(actor.people),
            policy=_plain_policy(policy_of(partition)),
            expires_at=expires_at,
        )
        dryruns.ask_for(proposal)
        orders.tell(partition.name, "proposal", proposal=proposal.pk, state=proposal.state, reason=reason)
    return proposal


def approve(proposal: Proposal, actor: Actor, reason: str = "") -> Proposal:
    """Vote for a proposal; with enough votes the switch is ordered. Operator; a vote is a person's, through whatever key.

    Raises Conflict when it is no longer open, has become stale (the split is another one), a force says otherwise, the
    person has voted, or a switch is under way; Forbidden for one's own proposal unless the policy allows it, and for a
    key that is nobody's.
    """
    stale = None
    with change(actor, reason, role="operator"):
        records.locked(proposal.partition)
        row = records.locked(proposal)
        _check_open(row)
        _check_vote(row, actor, VoteChoice.APPROVE)
        stale = _split_has_moved(row)
        if stale:
            close(row, ProposalState.STALE, stale)
        else:
            _check_not_forced(row)
            _vote(row, actor, VoteChoice.APPROVE, reason)
            if row.votes.filter(choice=VoteChoice.APPROVE).count() >= row.policy.get("approvals_required", 1):
                close(row, ProposalState.APPROVED, f"approved by {actor}")
                targets = dict.fromkeys(row.prefill, "prefill") | dict.fromkeys(row.decode, "decode")
                why = f"proposal {row.pk} approved by {actor}: {row.reason}"[:500]
                orders.place(row.partition, targets, Cause.PROPOSAL, actor, why, decision=row.decision, proposal=row)
    if stale:  # raised outside, so that the proposal's new state is kept
        raise Conflict(f"proposal {proposal.pk} is stale: {stale}", "proposal-stale")
    return row


def reject(proposal: Proposal, actor: Actor, reason: str) -> Proposal:
    """Vote against a proposal, which closes it. Operator; needs a reason. Raises Conflict when it is no longer open."""
    with change(actor, reason, role="operator", needs_reason=True):
        records.locked(proposal.partition)
        row = records.locked(proposal)
        _check_open(row)
        _check_vote(row, actor, VoteChoice.REJECT)
        _vote(row, actor, VoteChoice.REJECT, reason)
        close(row, ProposalState.REJECTED, f"rejected by {actor}: {reason}")
    return row


class NoVote(Forbidden):
    """Who asks has the role, but no vote on this proposal."""

    def __init__(self, message: str) -> None:
        Exception.__init__(self, message)


def close(proposal: Proposal, state: ProposalState, reason: str) -> None:
    """End an open proposal. Call within `change`."""
    proposal.state, proposal.closed_at, proposal.closed_reason = state.value, timezone.now(), reason[:500]
    proposal.save(update_fields=["state", "closed_at", "closed_reason"])
    orders.tell(proposal.partition.name, "proposal", proposal=proposal.pk, state=proposal.state, reason=reason)


def _check_open(proposal: Proposal) -> None:
    if proposal.state != ProposalState.OPEN:
        raise Conflict(f"proposal {proposal.pk} is {proposal.state}", "proposal-closed")
    if proposal.expires_at <= timezone.now():
        raise Conflict(f"proposal {proposal.pk} has expired", "proposal-expired")


def _split_has_moved(proposal: Proposal) -> str | None:
    split = desired_split(nodes_of(proposal.partition))
    if split["prefill"] != proposal.from_prefill or split["decode"] != proposal.from_decode:
        return "the split has changed since"
    return None


def _check_not_forced(proposal: Proposal) -> None:
    """Ordered against a force, the switch would be turned back as soon as it is done."""
    wanted = dict.fromkeys(proposal.prefill, "prefill") | dict.fromkeys(proposal.decode, "decode")
    forced = forced_phases(proposal.partition)
    against = [name for name, phase in wanted.items() if forced.get(name, phase) != phase]
    if against:
        raise Conflict(f"{', '.join(against)} is forced to another phase; clear that first", "forced")


def _check_vote(proposal: Proposal, actor: Actor, choice: VoteChoice) -> None:
    """A vote is a person's. Through a key it is its owner's, and nobody who knows the key's text may thereby vote twice,
    or approve what they proposed themselves. Raises NoVote or Conflict.
    """
    if not actor.voice:
        whose = f"{actor} belongs to no person" if actor.kind == "key" else f"{actor} is no person"
        raise NoVote(f"{whose} and has no vote; vote logged in, or with a key that has an owner")
    own = sorted(actor.people & set(proposal.people))
    if own and choice is VoteChoice.APPROVE and not proposal.policy.get("self_approval", False):
        raise NoVote(f"{_known(own[0], actor)} made this proposal; another person must approve it")
    for vote in proposal.votes.all():
        again = sorted(actor.people & set(vote.people))
        if again:
            raise Conflict(f"{_known(again[0], actor)} has voted on proposal {proposal.pk} already", "already-voted")


def _known(person: str, actor: Actor) -> str:
    """The person, and how they come to be counted where they are not plainly who acts."""
    if actor.kind == "person":
        return person
    return f"{person}, whose key {actor.name} is," if person == actor.voice else f"{person}, who issued {actor.name},"


def _vote(proposal: Proposal, actor: Actor, choice: VoteChoice, reason: str) -> None:
    Vote.objects.create(
        proposal=proposal,
        actor=str(actor),
        person=actor.voice,
        people=sorted(actor.people),
        user=actor.user,
        choice=choice,
        reason=reason,
    )


# -- force -----------------------------------------------------------------------------------------------------------


def force_split(
    partition: Partition,
    prefill_nodes: int | Sequence[str],
    actor: Actor,
    reason: str,
    expires_at: datetime | None = None,
) -> ForcedSplit:
    """Make these nodes prefill and all others decode, and keep it so. Administrator; needs a reason.

    Replaces every earlier force of the partition. While a switch is under way the force is stored and follows it.
    Raises InvalidField, or Conflict when a phase would be left without a node.
    """
    with change(actor, reason, role="administrator", needs_reason=True):
        records.locked(partition)
        targets = orders.split_targets(list(nodes_of(partition)), prefill_nodes)
        return _force(partition, "", targets, actor, reason, expires_at)


def force_node(node: Node, phase: str, actor: Actor, reason: str, expires_at: datetime | None = None) -> ForcedSplit:
    """Give one node a phase and keep it so; the planner holds meanwhile. Administrator; needs a reason.

    Raises InvalidField, or Conflict when a phase would be left without a node.
    """
    with change(actor, reason, role="administrator", needs_reason=True):
        records.locked(node.partition)
        return _force(node.partition, node.name, {node.name: phase}, actor, reason, expires_at)


def _force(
    partition: Partition,
    node: str,
    targets: dict[str, str],
    actor: Actor,
    reason: str,
    expires_at: datetime | None,
) -> ForcedSplit:
    check_future("expires_at", expires_at)
    orders.check_targets({row.name: row for row in nodes_of(partition)}, targets)
    for earlier in ForcedSplit.objects.select_for_update().filter(partition=partition, cleared_at=None):
        if node in ("", earlier.node):
            _clear(earlier, actor, "replaced by a newer force")
    force = ForcedSplit.objects.create(
        partition=partition, node=node, phases=targets, reason=reason, forced_by=str(actor), expires_at=expires_at
    )
    orders.check_after_switch(partition, forced_phases(partition))
    orders.tell(partition.name, "force", forced=targets, actor=str(actor), reason=reason)
    apply_forces(partition, actor, reason)
    return force


def apply_forces(partition: Partition, actor: Actor = SYSTEM, reason: str = "") -> SwitchOrder | None:
    """Order what the live forces ask for, if it is not so yet and no switch is under way."""
    newest = live_forces(partition).first()
    if newest is None:
        return None
    reason = reason or f"forced by {newest.forced_by}: {newest.reason}"[:500]
    with change(actor, reason):
        records.locked(partition)  # what is cleared meanwhile is no longer ordered
        targets = forced_phases(partition)
        if not targets or orders.moving_order(partition) is not None:
            return None
        return orders.place(partition, targets, Cause.FORCE, actor, reason)


def clear_force(partition: Partition, actor: Actor, reason: str, node: str | None = None) -> int:
    """End the partition's forces (or one node's); the split stays as it is. Administrator. Returns how many ended."""
    with change(actor, reason, role="administrator"):
        records.locked(partition)
        forces = ForcedSplit.objects.select_for_update().filter(partition=partition, cleared_at=None)
        if node is not None:
            forces = forces.filter(node=node)
        for force in forces:
            _clear(force, actor, reason)
        if forces:
            orders.tell(partition.name, "force", forced=None, actor=str(actor), reason=reason)
        return len(forces)


def _clear(force: ForcedSplit, actor: Actor, reason: str) -> None:
    force.cleared_at, force.cleared_by, force.clear_reason = timezone.now(), str(actor), reason
    force.save(update_fields=["cleared_at", "cleared_by", "clear_reason"])


# -- roll back -------------------------------------------------------------------------------------------------------


def roll_back(order: SwitchOrder, actor: Actor, reason: str, cause: Cause = Cause.ROLLBACK) -> SwitchOrder:
    """Undo a switch. Operator; needs a reason. Returns the order that does it.

    One under way turns its nodes round; a finished one is undone by a new order of the reverse moves. Raises Conflict for
    a failed or already undone order, for one that the split has moved on from, or while another switch is under way.
    """
    with change(actor, reason, role="operator", needs_reason=True):
        records.locked(order.partition)
        row = records.locked(order)
        if row.state in ACTIVE:
            return _turn_round(row, actor, reason)
        if row.state not in (OrderState.COOLING, OrderState.DONE):
            raise Conflict(f"order {row.pk} is {row.state}; there is nothing to undo", "not-undoable")
        steps = list(row.steps.all())
        phases: Mapping[str, str] = dict(nodes_of(row.partition).values_list("name", "desired_phase"))
        moved_on = [step.node for step in steps if phases.get(step.node) != step.to_phase]
        if moved_on:
            raise Conflict(f"{', '.join(moved_on)} has changed phase since order {row.pk}", "split-moved-on")
        if cause is Cause.ROLLBACK:
            for force in live_forces(row.partition):
                if set(force.phases) & {step.node for step in steps}:
                    _clear(force, actor, f"order {row.pk} rolled back")
        targets = {step.node: step.from_phase for step in steps}
        why = f"undoes order {row.pk}: {reason}"[:500]
        reverse = orders.place(row.partition, targets, cause, actor, why, rolls_back=row)
        assert reverse is not None, "an order always moves a node"
        return reverse


def _turn_round(order: SwitchOrder, actor: Actor, reason: str) -> SwitchOrder:
    if order.undoing:
        raise Conflict(f"order {order.pk} is being rolled back already", "already-undoing")
    for force in live_forces(order.partition):
        if set(force.phases) & set(order.steps.values_list("node", flat=True)):
            _clear(force, actor, f"order {order.pk} rolled back")
    return orders.turn_round(order, actor, reason)


# -- what time brings ------------------------------------------------------------------------------------------------


def expire(partition: Partition, now: datetime | None = None) -> None:
    """End freezes, forces and proposals whose time is over."""
    moment = now or timezone.now()
    with change(SYSTEM, "its time is over"):
        records.locked(partition)
        policy = PlannerPolicy.objects.select_for_update(of=("self",)).filter(partition=partition).first()
        if policy and policy.mode == Mode.FROZEN and policy.frozen_until and policy.frozen_until <= moment:
            policy.mode = policy.thaw_mode
            _thaw(policy)
            policy.save()
            _say(partition, policy, SYSTEM, "the freeze has ended")
        over = ForcedSplit.objects.select_for_update().filter(partition=partition, cleared_at=None)
        for force in over.filter(expires_at__lte=moment):
            _clear(force, SYSTEM, "expired")
            orders.tell(partition.name, "force", forced=None, actor=str(SYSTEM), reason="expired")
        waiting = Proposal.objects.select_for_update(of=("self",)).select_related("partition")
        for proposal in waiting.filter(partition=partition, state=ProposalState.OPEN, expires_at__lte=moment):
            close(proposal, ProposalState.EXPIRED, "nobody decided in time")
