"""Random damage to calls that work, deep inside their bodies and in their bytes: never a fault of the API's own.

Seeded, so a failure comes again; `test_nothing_breaks_it.py` tries chosen values in every field.
"""

import json
import random

import pytest

from controlplane.rest.problems import MEDIA_TYPE
from tests.api.operations import BY_NAME, LATER, OPERATIONS, WHY

pytestmark = pytest.mark.django_db
ROUNDS = 20
NASTY = [
    *(None, True, False, [], {}, "", " ", "\x00", "x\x00y", "\ud83d", "é" * 70, "x" * 600, "gb300-1", "premium", "*"),
    *(0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**18, 10**400, 0.5, -0.0, 1e-320, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "NaN", "1e999", "0x10", "1_000", "١", "2026-02-30", "12:00"),
    *("0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2099-01-01T00:00:00", LATER, "P1D", [[]], [{}]),
    *(["gb300-1", "gb300-1"], [1], ["\x00"], {"": 1}, {"\x00": 1}, {"premium": 1}, {"name": {"name": {}}}),
]
BAND = {"fairness": "round-robin", "ordering": "fcfs", "max_requests": 10, "max_bytes": 10**6, "ttl_s": 5.0,
        "ceiling": 0.9, "min_share": 0.1}  # fmt: skip
STAGE = {"detector": "concurrency", "mode": "requests", "limit_per_node": 4}
EVERYTHING = {
    "create_tenant": {"name": "n", "title": "t", "sharing_domain": "d", "weight": 2, "default_objective": "standard"},
    "edit_tenant": {"title": "t", "sharing_domain": "d", "weight": 2, "paused": True, "default_objective": "premium"},
    "issue_key": {"name": "n", "role": "viewer", "trusted": True, "objectives": ["premium"], "expires_at": LATER},
    "edit_partition": {
        "title": "t",
        "routing_policy": "ttft",
        "lease": {"multiple": 4.0, "ceiling_s": 3600, "floor_s": 60},
    },
    "edit_node": {"enabled": True, "draining": False, "decode_limit": 9},
    "create_band": {"name": "n", "priority": 3, **BAND},
    "edit_band": {"priority": 3, **BAND},
    "create_objective": {"name": "n", "band": "premium", "slo_ttft_s": 2.0, "ttl_s": 3.0},
    "edit_objective": {"band": "standard", "slo_ttft_s": 2.0, "ttl_s": 3.0},
    "edit_flow_settings": {
        "max_requests": 10,
        "max_bytes": 10**6,
        "default_ttl_s": 9,
        "empty_pool_ttl_s": 9,
        "displacement": False,
        "prefill": STAGE,
        "decode": STAGE,
        "default_band": BAND,
    },
    "force_split": {"prefill_nodes": ["gb300-1"], "expires_in_s": 60.0},
    "force_node": {"phase": "decode", "expires_at": LATER},
    "freeze_split": {"until": LATER},
    "propose_split": {"prefill_nodes": ["gb300-1", "gb300-3"], "expires_at": LATER},
    "edit_policy": {
        "slice_s": 12.0,
        "slices_per_window": 10,
        "cooldown_s": 5,
        "drain_deadline_s": 60,
        "slo_ttft_s": 5,
        "max_stale_ratio": 0.2,
        "min_utilisation": 0.5,
        "approvals_required": 1,
        "self_approval": True,
        "auto_warm_up": False,
        "warm_up_rung_s": 15.0,
        "warm_up_limit_s": 600.0,
    },
    "ask_dry_run": {"prefill_nodes": ["gb300-1"]},
}
WITH_BODY = [operation for operation in OPERATIONS if operation.body is not None]


def whole(operation):
    return {**(EVERYTHING.get(operation.name) or operation.body), **WHY}


def places(node, at=()):
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        yield (*at, key)
        yield from places(value, (*at, key))


def damaged(body, chance):
    """A copy with something nasty in one place or two, or a member taken out or added."""
    copied = json.loads(json.dumps(body))
    for _ in range(chance.choice((1, 1, 2))):
        spots = list(places(copied))
        if not spots:
            break
        spot = chance.choice(spots)
        at = copied
        for key in spot[:-1]:
            at = at[key]
        what = chance.random()
        if what < 0.1:
            del at[spot[-1]]
        elif what < 0.2 and isinstance(at, dict):
            at[chance.choice(("surprise", "id", "partition", "\x00", "é"))] = chance.choice(NASTY)
        else:
            at[spot[-1]] = chance.choice(NASTY)
    return copied


def garbled(text, chance):
    """Bytes that are hardly JSON: cut, stabbed, nested without end, in another encoding."""
    at = chance.randrange(len(text))
    return chance.choice(
        (
            text[:at],
            text[:at] + bytes([chance.randrange(256)]) + text[at + 1 :],
            text[:at] + b"\xed\xa0\x80" + text[at:],
            b"[" * 60_000 + text,
            b'{"a":' * 60_000 + b"1" + b"}" * 60_000,
            text.replace(b'"a test"', b"[" * 5_000 + b"]" * 5_000),
            text.replace(b'"a test"', b"1" * 6_000),
            text.replace(b'"a test"', b'"\\u0000\\ud800"'),
            text.decode().encode("utf-16"),
            b"\xef\xbb\xbf" + text,
        )
    )


def fault(answer):
    """What is wrong with an answer; blank for none. 503 is fine where a gateway is asked: there is none here."""
    if answer.status_code >= 500 and answer.status_code != 503:
        return f"answered {answer.status_code}: {answer.content[:200]!r}"
    if answer.status_code >= 400 and answer["Content-Type"] != MEDIA_TYPE:
        return f"{answer.status_code} is no problem detail but {answer['Content-Type']}"
    return ""


@pytest.fixture
def faults_of(rest, live, address, undone):
    def faults_of(operation, bodies):
        found = []
        for number, body in enumerate(bodies):
            # Half of the calls go the way of repeats, which keep what was answered.
            headers = {"Idempotency_Key": f"k{number}"} if operation.method == "post" and number % 2 else {}
            with undone():
                answer = rest.answer(operation.method, address(operation.path), body, **headers)
            if told := fault(answer):
                found.append(f"{operation} {body[:200]!r}: {told}")
        return found

    return faults_of


def test_the_whole_bodies_work_before_they_are_damaged(rest, live, address, undone):
    for operation in WITH_BODY:
        with undone():
            status, body = rest(operation.method, address(operation.path), whole(operation))
        assert status == operation.status, (str(operation), body)
    assert set(EVERYTHING) <= set(BY_NAME)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_damage_inside_a_body_is_a_fault_of_the_api(faults_of, seed):
    chance = random.Random(seed)
    found = []
    for operation in WITH_BODY:
        bodies = [json.dumps(damaged(whole(operation), chance)).encode() for _ in range(ROUNDS // 2)]
        found += faults_of(operation, bodies)
    assert not found


def test_no_garbled_body_is_a_fault_of_the_api(faults_of):
    chance = random.Random(3)
    found = []
    for operation in WITH_BODY:
        text = json.dumps(whole(operation)).encode()
        found += faults_of(operation, [garbled(text, chance) for _ in range(ROUNDS // 3)])
    assert not found


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/json; charset=utf-16", "application/json; charset=nope",
                     "multipart/form-data", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"]
)  # fmt: skip
def test_no_content_type_is_a_fault_of_the_api(rest, undone, content_type):
    rest.log_in("administrator")
    for operation in WITH_BODY:
        with undone():
            answer = rest.client.generic(
                operation.method.upper(),
                f"/api/v1{operation.path}".replace("{", "").replace("}", ""),
                json.dumps(whole(operation)),
                content_type=content_type,
                headers={"Idempotency-Key": "k"},
            )
        assert not fault(answer), (operation.name, content_type)


def test_a_body_too_large_is_refused_also_with_an_idempotency_key(rest):
    large = b'{"reason": "' + b"x" * 2_100_000 + b'"}'
    for headers in ({}, {"Idempotency_Key": "k"}):
        answer = rest.answer("post", "/tenants/acme/pause", large, **headers)
        assert (answer.status_code, json.loads(answer.content)["code"]) == (413, "body-too-large")
