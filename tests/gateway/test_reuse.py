"""Reuse as the gateway accounts it, with real nodes behind: what was lost, and to which cause, in snapshot and metrics."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.world import KEY, World, agent_spec, document, key, prompt, world

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


@pytest.mark.parametrize("policy", ["ttft", "round-robin", "cache-aware"])
async def test_a_storm_over_full_pools_adds_up_to_the_token(tmp_path: Path, policy: str) -> None:
    """Two tenants' branches grow, fork, are rewritten and broken off at once, over pools too small for them."""
    rng = random.Random(policy)
    phases = {"n1": "prefill", "n2": "prefill", "n3": "decode"}
    spec = agent_spec(tmp_path / "agent", phases, speed=50.0, pool_blocks=96)
    described = document([])
    changes = {
        "tenants": [*described["tenants"], described["tenants"][0] | {"name": "other", "sharing_domain": "other"}],
        "keys": [*described["keys"], key("sk-other", tenant="other", trusted=True)],
        "routing": {"policy": policy},
    }
    async with world(tmp_path, phases, spec=spec, **changes) as yard:
        lengths = dict.fromkeys(range(8), 4)

        async def turn(number: int) -> None:
            branch = rng.choice(list(lengths))
            lengths[branch] += rng.randrange(1, 5)
            first_id = 10_000 * branch + rng.choice((0, 0, 0, 500))
            body = prompt(lengths[branch] % 40 + 2, max_tokens=rng.randrange(1, 200), first_id=first_id)
            headers = {"x_switchyard_branch": f"b{branch}"} if branch % 2 else {}
            secret = KEY if branch < 5 else "sk-other"
            asked = asyncio.create_task(yard.complete(body, secret=secret, **headers))
            if number % 6 == 0:
                await asyncio.sleep(0.05 * rng.random())
                asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)

        for start in range(0, 60, 6):
            await asyncio.gather(*(turn(start + n) for n in range(6)))
            reuse(yard)
        await yard.idle()
        shown = reuse(yard)
    assert shown["ideal_tokens"] > shown["actual_tokens"] > 0
    assert shown["lost"]["evicted"] > 0
