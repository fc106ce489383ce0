"""Parts without sockets: stop strings, headers, and the checked configuration document."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.world import KEY, UNTRUSTED_KEY, document, node
from workers.gateway.errors import ApiError
from workers.gateway.signals import authenticate, branch_signal, standing
from workers.gateway.stops import StopMatcher
from workers.yard.config import ConfigError, PartitionConfig


def fed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    """What goes out when text comes in pieces, and whether a stop string ended it."""
    matcher, out = StopMatcher(stops), ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        out += text
        if matched:
            return out, True
    return out + matcher.flush(), False


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("END",), "one END two", ("one ", True)),
        (("END",), "one EN two", ("one EN two", False)),
        (("END",), "one EN", ("one EN", False)),
        (("aab",), "aaab", ("a", True)),
        (("\n\n", "###"), "a\n#\n##\n\nb", ("a\n#\n##", True)),
        ((), "anything", ("anything", False)),
        (("é!",), "café!", ("caf", True)),
    ],
)
def test_a_stop_string_is_found_however_the_text_is_cut(
    size: int, stops: tuple[str, ...], text: str, expected: tuple[str, bool]
) -> None:
    assert fed(stops, [text[at : at + size] for at in range(0, len(text), size)]) == expected


def test_text_that_cannot_begin_a_stop_string_is_not_held_back() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("hello") == ("hello", False)
    assert matcher.push(" E") == (" ", False)


def caller(secret: str) -> Any:
    config = PartitionConfig.parse(document([]))
    return config, authenticate(config, {"authorization": f"Bearer {secret}"}, 10.0)


def test_a_trusted_key_chooses_objective_flow_and_deadline() -> None:
    config, trusted = caller(KEY)
    headers = {
        "x-llm-d-inference-objective": "premium",
        "x-gateway-inference-fairness-id": "team-7",
        "x-llm-d-inference-ttl": "500ms",
        "x-llm-d-slo-ttft-ms": "1500",
    }
    place = standing(config, trusted, headers)
    assert (place.band, place.flow_id, place.ttl_s, place.slo_ttft_s) == ("premium", "team-7", 0.5, 1.5)
    _, untrusted = caller(UNTRUSTED_KEY)
    place = standing(config, untrusted, headers)
    assert (place.band, place.flow_id, place.ttl_s, place.slo_ttft_s) == ("standard", "acme", None, None)


def test_branches_are_known_by_several_headers_and_kept_apart_by_tenant() -> None:
    _, known = caller(KEY)
    for header in ("x-switchyard-branch", "x-dynamo-session-id"):
        assert branch_signal(known, {header: "b1"}, "body").branch_id == "acme/b1"
    for header in ("x-claude-code-session-id", "x-session-id"):
        signal = branch_signal(known, {header: "s1"}, "body")
        assert (signal.branch_id, signal.session, signal.program) == (None, "acme/s1", "s1")
    assert branch_signal(known, {}, "body").session == "acme/body"
    assert branch_signal(known, {}, None).branch_id is None
    signal = branch_signal(
        known,
        {
            "x-switchyard-branch": "b2",
            "x-switchyard-parent": "b1",
            "x-switchyard-relation": "fork",
            "x-switchyard-branch-version": "3",
            "x-switchyard-branch-sequence": "17",
            "x-switchyard-branch-end": "true",
        },
        None,
    )
    assert (signal.parent, signal.relation, signal.version, signal.end) == ("acme/b1", "fork", 3, True)
    assert signal.sequence == 17


def test_a_claude_code_sub_agent_is_a_branch_of_its_session() -> None:
    _, known = caller(KEY)
    headers = {"x-claude-code-session-id": "s1", "x-claude-code-agent-id": "a1"}
    signal = branch_signal(known, headers, None)
    assert (signal.branch_id, signal.parent, signal.relation) == ("acme/s1/a1", "acme/s1", "subagent")
    nested = branch_signal(known, {**headers, "x-claude-code-parent-agent-id": "a0"}, None)
    assert nested.parent == "acme/s1/a0"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-switchyard-branch-version": "-1"},
        {"x-switchyard-branch-sequence": "one"},
        {"x-switchyard-branch-end": "maybe"},
        {"x-session-id": "x" * 201},
    ],
)
def test_a_bad_branch_header_is_named(headers: dict[str, str]) -> None:
    _, known = caller(KEY)
    with pytest.raises(ApiError) as error:
        branch_signal(known, headers, None)
    assert (error.value.status, error.value.param) == (400, next(iter(headers)))


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with one field changed; `path` like `nodes.0.order`."""
    configuration = document([node("n1", 0, "prefill", "http://h")])
    place: Any = configuration
    *steps, last = path.split(".")
    for step in steps:
        place = place[int(step)] if step.isdigit() else place[step]
    place[int(last) if last.isdigit() else last] = value
    return configuration


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("version", "1", "version"),
        ("model.block_tokens", 0, "model.block_tokens"),
        ("model.tokenizer", "bpe", "model.tokenizer"),
        ("network.latency_s", None, "network.latency_s"),
        ("nodes.0.phase", "idle", "nodes[0].phase"),
        ("nodes.0.coefficients.c0", -1, "nodes[0].coefficients.c0"),
        ("nodes.0.coefficients", [], "nodes[0].coefficients"),
        ("keys.0.sha256", "abc", "keys[0].sha256"),
        ("keys.0.tenant", "nobody", f"keys[{KEY}].tenant"),
        ("tenants.0.default_objective", "x", "tenants[acme].default_objective"),
        ("objectives.0.band", "x", "objectives[premium].band"),
        ("bands.0.fairness", "dice", "bands[0].fairness"),
        ("bands.0.priority", 0, "bands[1].priority"),
        ("routing.policy", "dice", "routing.policy"),
        ("lease.multiple", 0, "lease.multiple"),
        ("nodes", {}, "nodes"),
    ],
)
def test_a_configuration_that_cannot_be_used_names_its_first_bad_field(path: str, value: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        PartitionConfig.parse(changed(path, value))
    assert error.value.field == field
    assert error.value.expected
