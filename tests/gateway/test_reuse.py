"""Reuse as the gateway accounts it, with real nodes behind: what was lost, and to which cause, in snapshot and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gateway.world import World, agent_spec, prompt, world

CAUSES = {"evicted", "routed", "switched", "fetch-failed", "never-stored"}


def reuse(yard: World) -> dict[str, Any]:
    """The snapshot's reuse; checked to add up, here and in every part."""
    kv = yard.serving.yard.kv
    kv.check_integrity()
    total = kv.reuse()
    for dimension in ("node", "tenant", "workload"):
        parts = kv.reuse_by(dimension).values()
        assert sum(part.prompt_tokens for part in parts) == total.prompt_tokens
        assert sum(part.actual_tokens for part in parts) == total.actual_tokens
        assert {c: sum(part.lost[c] for part in parts) for c in CAUSES} == total.lost
    shown: dict[str, Any] = yard.gateway.snapshot()["reuse"]
    assert sum(shown["lost"].values()) == shown["ideal_tokens"] - shown["actual_tokens"]
    return shown


async def test_with_room_for_everything_nothing_is_lost(tmp_path: Path) -> None:
    async with world(tmp_path) as yard:
        for blocks in (10, 14, 20):
            await yard.complete(prompt(blocks))
        await yard.idle()
        shown = reuse(yard)
        assert (shown["ideal_tokens"], shown["actual_tokens"]) == (24 * 64, 24 * 64)
        assert not any(shown["lost"].values())


async def test_a_pool_that_is_too_small_loses_reuse_to_eviction(tmp_path: Path) -> None:
    spec = agent_spec(tmp_path / "agent", {"n1": "prefill", "n2": "decode"}, pool_blocks=32)
    async with world(tmp_path, {"n1": "prefill", "n2": "decode"}, spec=spec) as yard:
        for first_id in (1, 1001, 2001, 1):
            await yard.complete(prompt(20, max_tokens=2, first_id=first_id))
            await yard.idle()
        shown = reuse(yard)
        assert shown["ideal_tokens"] == 20 * 64
        assert shown["lost"]["evicted"] == 20 * 64 - shown["actual_tokens"] >= 8 * 64


async def test_a_router_that_ignores_the_cache_loses_reuse_to_routing(tmp_path: Path) -> None:
    phases = {"n1": "prefill", "n2": "prefill", "n3": "decode"}
    async with world(tmp_path, phases, routing={"policy": "round-robin"}) as yard:
        await yard.complete(prompt(20, max_tokens=2))
        await yard.idle()
        await yard.complete(prompt(20, max_tokens=2))
        await yard.idle()
        shown = reuse(yard)
        assert shown["lost"]["routed"] == 20 * 64 and shown["actual_tokens"] == 0
        record = yard.gateway.snapshot()["recent"][0]
        assert record["prefill_node"] == "n2"


async def test_metrics_tell_reuse_and_its_losses_by_node_tenant_and_workload(tmp_path: Path) -> None:
    phases = {"n1": "prefill", "n2": "prefill", "n3": "decode"}
    async with world(tmp_path, phases, routing={"policy": "round-robin"}) as yard:
        for _ in range(2):
            await yard.complete(prompt(20, max_tokens=2))
            await yard.idle()
        text = await (await yard.http.get(f"{yard.url}/metrics")).text()
    assert 'switchyard_reuse_lost_tokens_total{by="node",cause="routed",name="n2"} 1280.0' in text
    assert 'switchyard_reuse_tokens_total{by="tenant",kind="ideal",name="acme"} 1280.0' in text
    assert 'switchyard_reuse_tokens_total{by="workload",kind="prompt",name="standard"} 2574.0' in text
