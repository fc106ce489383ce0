"""Split: what it shows, and every action with its refusals."""

from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from apps.planning import services
from apps.planning.models import Decision, DryRun, ForcedSplit, PlannerPolicy, Proposal, SwitchOrder
from controlplane.actors import PLANNER, Actor
from tests.console.kit import candidate
from tests.factories import actor_with, make_user
from tests.planning.test_services import finish

BASE = "/p/gb300/split/"
ADA = actor_with("administrator", "ada")


def propose(partition, actor=PLANNER):
    ends = timezone.now() + timedelta(minutes=5)
    return services.propose(partition, ["gb300-1", "gb300-2", "gb300-3"], actor, "more prompts", ends)


def decide(partition, **changes):
    phases = {"current_prefill": ["gb300-1", "gb300-2"], "current_decode": ["gb300-3", "gb300-4"]}
    more = candidate(
        ["gb300-1", "gb300-2", "gb300-3"],
        ["gb300-4"],
        0.02,
        0.03,
        0.06,
        "within_noise",
        [("gb300-3", "decode", "prefill")],
    )
    fewer = candidate(["gb300-1"], ["gb300-2", "gb300-3", "gb300-4"], -0.5, 0.1, 0.2, "no_gain")
    workload = {
        "t_uc": 20000.0,
        "pairs": 1e9,
        "t_rst": 1000.0,
        "t_out": 300.0,
        "t_acc": 2.2,
        "u_tokens": 1.0,
        "in_flight": 9,
    }
    piece = {
        "t0": 1000.0, "t1": 1060.0, "workload": workload, "rate": 1.5, "prefill_utilisation": 0.9,
        "decode_utilisation": 0.4, "prefill_wait_p95_s": 1.0, "stale_ratio": 0.0,
    }  # fmt: skip
    detail = {
        "candidates": [fewer, more],
        "rules": [["no switch is running", "ok", ""], ["some stage is busy enough", "idle", "prefill is 40 % busy"]],
        "window": [piece],
    }
    values = {
        "window_start": 0, "window_end": 60, "verdict": "hold", "rule": "within_noise", "source": "learned",
        "reason": "best other split 3P1D: within the noise of the window", "mode": "approve", "theta": 2.0, "gain": 0.02,
        "standard_error": 0.03, "threshold": 0.06, "slices": 10, "slices_used": 8, "detail": detail, **phases,
    }  # fmt: skip
    return Decision.objects.create(partition=partition, **(values | changes))


def typed(prefix, **values):
    return {f"{prefix}-{name}": value for name, value in values.items()}


# -- what it shows ---------------------------------------------------------------------------------------------------


def test_before_the_first_window_it_says_when_one_ends(as_role, live):
    page = as_role("viewer").get(BASE).content.decode()
    assert "2P2D, not judged yet" in page
    assert "each window of 10 min" in page
    assert "no open proposal" in page
    assert "nothing is forced" in page


def test_a_held_decision_shows_why_its_candidates_and_its_inputs(as_role, live, partition):
    decide(partition)
    page = as_role("viewer").get(BASE).content.decode()
    assert "Holds 2P2D" in page
    assert "within the noise of the window" in page
    assert page.index("3P1D<small>") < page.index("1P3D<small>")
    assert "gb300-3 to prefill" in page
    assert "+0.020 <" in page
    assert "± 0.030" in page
    assert "prefill is 40 % busy" in page
    assert "20k" in page


def test_a_viewer_sees_a_proposal_but_no_way_to_decide(as_role, live, partition):
    propose(partition)
    page = as_role("viewer").get(BASE).content.decode()
    assert "Proposes 3P1D" in page
    assert "data-changed" in page
    assert "hx-target" not in page.split('id="split-state"')[1].split("</main>")[0]


def test_the_current_mark_is_what_the_gateway_sees(as_role, partition, redis_client):
    from tests.console.kit import node, publish_snapshot, snapshot

    nodes = [node("gb300-1", state="draining", target_phase="decode"), node("gb300-2"), node("gb300-3", "decode")]
    publish_snapshot(redis_client, snapshot(nodes=nodes))
    page = as_role("viewer").get(BASE + "state/").content.decode()
    assert 'data-kind="draining" title="gb300-1: draining"' in page


def test_a_switch_under_way_shows_its_steps(as_role, live, partition):
    services.force_split(partition, 3, ADA, "peak")
    page = as_role("operator").get(BASE + "state/").content.decode()
    assert "Switching to 3P1D" in page
    assert "decode → prefill" in page
    assert "Roll back" in page


# -- proposals -------------------------------------------------------------------------------------------------------


def test_a_proposal_is_an_interval_against_its_threshold_node_by_node(as_role, live, partition):
    proposal = propose(partition)
    Proposal.objects.filter(pk=proposal.pk).update(gain=0.4, standard_error=0.1, threshold=0.25)
    page = as_role("viewer").get(BASE).content.decode()
    assert 'aria-label="gain +0.400 ± 0.100 req/s, threshold +0.250 req/s"' in page
    assert 'class="strip passed"' in page
    nodes = page.partition('aria-label="Node by node"')[2].partition("</ul>")[0]
    assert nodes.count("<li") == 4
    assert nodes.count("data-changed") == 1
    assert nodes.index("gb300-1") < nodes.index("gb300-4")
    Proposal.objects.filter(pk=proposal.pk).update(gain=0.2)
    assert 'class="strip passed"' not in as_role("viewer").get(BASE).content.decode()


def test_an_operator_approves_and_the_switch_is_ordered(as_role, partition):
    proposal = propose(partition)
    client = as_role("operator")
    assert b"Approve and switch to 3P1D" in client.get(f"{BASE}proposals/{proposal.pk}/approve/").content
    answer = client.post(f"{BASE}proposals/{proposal.pk}/approve/", typed("approve", reason="right"))
    assert answer.status_code == 200
    assert answer["HX-Retarget"] == "#said"
    assert answer["HX-Trigger"] == "switchyard:changed"
    assert SwitchOrder.objects.get().ordered_by == "operator-person"


def test_nobody_approves_an_own_proposal(as_role, partition):
    proposal = propose(partition, actor_with("operator", "operator-person"))
    answer = as_role("operator").post(f"{BASE}proposals/{proposal.pk}/approve/", typed("approve", reason=""))
    assert answer.status_code == 422
    assert b"another person must approve it" in answer.content
    assert not SwitchOrder.objects.exists()


def test_a_rejection_needs_a_reason(as_role, partition):
    proposal = propose(partition)
    client, address = as_role("operator"), f"{BASE}proposals/{proposal.pk}/reject/"
    refused = client.post(address, typed("reject", reason=" "))
    assert refused.status_code == 422
    assert b'id="id_reject-reason_error">Say why' in refused.content
    assert client.post(address, typed("reject", reason="not tonight")).status_code == 200
    proposal.refresh_from_db()
    assert (proposal.state, proposal.closed_reason) == ("rejected", "rejected by operator-person: not tonight")


def test_a_closed_proposal_is_a_conflict_one_can_read(as_role, partition):
    proposal = propose(partition)
    services.reject(proposal, ADA, "no")
    answer = as_role("operator").post(f"{BASE}proposals/{proposal.pk}/approve/", typed("approve", reason=""))
    assert answer.status_code == 422
    assert b"is rejected" in answer.content


def test_votes_and_proposals_through_keys_show_the_person_and_the_key(as_role, partition):
    services.update_policy(partition, ADA, approvals_required=2)
    bob, cyd = (make_user(name, "operator") for name in ("bob", "cyd"))
    proposal = propose(partition, Actor("key", "acme/ci", bob, frozenset({"operator"})))
    services.approve(proposal, Actor("key", "acme/laptop", cyd, frozenset({"operator"})))
    page = as_role("operator").get(BASE).content.decode()
    assert "cyd (key:acme/laptop): approve" in page
    assert "bob (key:acme/ci)" in page


def test_a_key_of_a_person_is_issued_here_and_says_whose_it_is(as_role, partition):
    make_user("bob", "viewer")
    client, address = as_role("administrator"), "/p/gb300/tenants/of/acme/keys/new/"
    values = {"key-name": "laptop", "key-role": "operator", "key-owner": "bob", "key-days": "30", "key-reason": "his"}
    refused = client.post(address, values)
    assert refused.status_code == 422
    assert b"Expected somebody with the role operator, which bob does not have." in refused.content
    assert client.post(address, values | {"key-role": "viewer"}).status_code == 200
    assert "as bob" in client.get("/p/gb300/tenants/of/acme/").content.decode()


def test_proposals_and_orders_of_another_partition_are_not_found(as_role, partition):
    from tests.factories import make_partition

    other = make_partition("other")
    ends = timezone.now() + timedelta(minutes=5)
    theirs = services.propose(other, 2, PLANNER, "why not", ends)
    client = as_role("operator")
    assert client.get(f"{BASE}proposals/{theirs.pk}/approve/").status_code == 404
    assert client.get(f"{BASE}orders/999/roll-back/").status_code == 404


# -- force, freeze, mode, roll back ----------------------------------------------------------------------------------


def forced(**changes):
    values = {"prefill_nodes": ["gb300-1"], "minutes": "60", "reason": "long decodes", "confirm": "gb300"} | changes
    return typed("force", **values)


def test_a_forced_split_is_kept_with_its_reason_and_end(as_role, partition):
    answer = as_role("administrator").post(f"{BASE}force/", forced())
    assert answer.status_code == 200
    assert b"forced to 1P3D" in answer.content
    force = ForcedSplit.objects.get()
    assert (force.reason, force.forced_by) == ("long decodes", "administrator-person")
    assert timedelta(minutes=59) < force.expires_at - timezone.now() < timedelta(minutes=61)
    page = as_role("viewer").get(BASE).content.decode()
    assert "Forced 1P3D" in page.replace("<strong>", "").replace("</strong>", "")


def test_a_force_may_have_no_end(as_role, partition):
    as_role("administrator").post(f"{BASE}force/", forced(minutes=""))
    assert ForcedSplit.objects.get().expires_at is None


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"confirm": ""}, "confirm", "Type gb300 here"),
        ({"confirm": "GB300"}, "confirm", "Type gb300 here"),
        ({"reason": ""}, "reason", "Say why"),
        ({"prefill_nodes": []}, "prefill_nodes", "would prefill"),
        ({"prefill_nodes": ["gb300-9"]}, "prefill_nodes", "valid choice"),
        ({"minutes": "7"}, "minutes", "valid choice"),
    ],
)
def test_a_force_is_refused_at_its_field(as_role, partition, changes, field, message):
    answer = as_role("administrator").post(f"{BASE}force/", forced(**changes))
    assert answer.status_code == 422
    error = answer.content.decode().split(f'id="id_force-{field}_error">')[1].split("</p>")[0]
    assert message in error
    assert not ForcedSplit.objects.exists()


def test_a_force_is_ended_and_the_planner_decides_again(as_role, partition):
    services.force_split(partition, 1, ADA, "test")
    client = as_role("administrator")
    assert b"1 force ended" in client.post(f"{BASE}force/clear/", typed("clear", reason="over")).content
    assert b"Nothing was forced" in client.post(f"{BASE}force/clear/", typed("clear", reason="over")).content


def test_freezing_needs_a_reason_and_unfreezing_returns_to_the_mode_before(as_role, partition):
    client = as_role("administrator")
    assert client.post(f"{BASE}freeze/", typed("freeze", minutes="15", reason="")).status_code == 422
    assert client.post(f"{BASE}freeze/", typed("freeze", minutes="15", reason="demo")).status_code == 200
    policy = PlannerPolicy.objects.get()
    assert (policy.mode, policy.freeze_reason) == ("frozen", "demo")
    page = client.get(BASE).content.decode()
    assert "Frozen at 2P2D" in page
    assert "Unfreeze" in page
    assert b"mode approve" in client.post(f"{BASE}unfreeze/", typed("unfreeze", reason="")).content
    again = client.post(f"{BASE}unfreeze/", typed("unfreeze", reason=""))
    assert again.status_code == 422
    assert b"is not frozen" in again.content


def test_the_mode_is_chosen_from_those_that_do_not_freeze(as_role, partition):
    client = as_role("administrator")
    assert client.post(f"{BASE}mode/", typed("mode", mode="automatic", reason="trusted")).status_code == 200
    assert PlannerPolicy.objects.get().mode == "automatic"
    assert client.post(f"{BASE}mode/", typed("mode", mode="frozen", reason="")).status_code == 422
    assert client.post(f"{BASE}mode/", {}).status_code == 422


def test_a_finished_switch_is_rolled_back_from_the_history(as_role, live, partition):
    services.force_split(partition, 3, ADA, "peak")
    order = finish(SwitchOrder.objects.get())
    services.clear_force(partition, ADA, "over")
    SwitchOrder.objects.filter(pk=order.pk).update(state="done", finished_at=timezone.now())
    client, address = as_role("operator"), f"{BASE}orders/{order.pk}/roll-back/"
    assert f'hx-get="{address}"' in client.get(BASE).content.decode()
    assert client.post(address, typed(f"roll-back-{order.pk}", reason="")).status_code == 422
    answer = client.post(address, typed(f"roll-back-{order.pk}", reason="peak is over"))
    assert answer.status_code == 200
    undo = SwitchOrder.objects.exclude(pk=order.pk).get()
    assert (undo.cause, undo.rolls_back_id) == ("rollback", order.pk)


def test_a_failed_switch_cannot_be_rolled_back_and_says_so(as_role, partition):
    services.force_split(partition, 3, ADA, "peak")
    order = SwitchOrder.objects.get()
    SwitchOrder.objects.update(state="failed")
    answer = as_role("operator").post(f"{BASE}orders/{order.pk}/roll-back/", typed(f"roll-back-{order.pk}", reason="x"))
    assert answer.status_code == 422
    assert b"nothing to undo" in answer.content
    assert Proposal.objects.count() == 0


def test_a_dry_run_stands_beside_its_proposal_with_each_figure_now_and_then(as_role, partition):
    proposal = propose(partition)
    figures = {"throughput_rps": 2.0, "ttft_mean_s": 1.0, "ttft_p95_s": 2.0, "e2e_mean_s": 8.0, "e2e_p95_s": 9.0}
    better = {name: value * (1.1 if name == "throughput_rps" else 0.5) for name, value in figures.items()}
    DryRun.objects.filter(proposal=proposal).delete()
    DryRun.objects.create(
        partition=partition, proposal=proposal, prefill=proposal.prefill, decode=proposal.decode, asked_by="planner",
        state="done", result={"current": figures, "candidate": better, "agents": 40, "scored_s": 600.0},
    )  # fmt: skip
    page = as_role("viewer").get(BASE).content.decode()
    assert "In the simulator" in page and "+10.0 %" in page and "−50.0 %" in page
    assert "40 agents" in page
    assert "+10.0 %" in as_role("viewer").get("/p/gb300/what-if/").content.decode()


def test_a_decision_over_many_splits_is_read_once_and_says_how_many_are_not_shown(as_role, live, partition):
    many = [candidate(["gb300-1"], ["gb300-2"], 0.001 * n, 0.1, 0.2, "no_gain") for n in range(40)]
    first = decide(partition, detail={"candidates": many, "rules": [], "window": []})
    client = as_role("viewer")
    page = client.get(BASE).content.decode()
    assert "28 more with less gain are not shown" in page
    assert "+0.039" in page and "+0.027" not in page

    def details_read():
        with CaptureQueriesContext(connection) as asked:
            client.get(BASE)
        return sum('"planning_decision"."detail"' in query["sql"] for query in asked.captured_queries)

    assert details_read() == 0
    newer = decide(
        partition, window_start=60, window_end=120, reason="a newer window", at=first.at + timedelta(minutes=1)
    )
    assert details_read() == 1
    assert f"decision {newer.pk}" in client.get(BASE).content.decode()
