"""What the router sees and foresees: predictions against what came, and what it says when it is blind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.gateway.world import SYMBOLIC, document, prompt, running_gateway, until, world


async def test_every_request_tells_how_wrong_its_prediction_was(tmp_path: Path) -> None:
    async with world(tmp_path, speed=1.0) as yard:
        await until(lambda: not yard.serving.yard.blind(yard.serving.clock()))
        for blocks in (10, 200, 400):
            await yard.complete(prompt(blocks, max_tokens=2))
            await yard.idle()
        snapshot = yard.gateway.snapshot()
        text = await (await yard.http.get(f"{yard.url}/metrics")).text()
    router = snapshot["router"]
    assert (router["policy"], router["decisions"], router["blind"], router["blind_decisions"]) == ("ttft", 3, [], {})
    assert router["prediction"]["error_ratio"]["n"] == 3
    assert router["prediction"]["error_ratio"]["p50"] < 0.5
    (node,) = router["prediction"]["nodes"]
    assert (node["name"], node["n"]) == ("n1", 3)
    assert all(row["predicted_ttft_s"] > 0 and row["ttft_s"] > 0 for row in snapshot["recent"])
    assert 'switchyard_ttft_prediction_error_seconds_count{node="n1"} 3.0' in text


async def test_a_node_whose_events_stop_is_routed_by_load_alone_and_that_is_said(tmp_path: Path) -> None:
    async with world(tmp_path) as yard:
        kv = yard.serving.yard.kv
        await until(lambda: not yard.serving.yard.blind(yard.serving.clock()))
        await yard.complete(prompt(10, max_tokens=2))
        await yard.idle()
        await until(lambda: "n1" in kv.unseen(yard.serving.clock() + 100.0, ["n1"]))  # it sends heartbeats
        kv.reconfigure(type(kv.config)(lease=kv.config.lease, silent_after_s=0.0))  # a heartbeat is now always too old
        response = await yard.complete(prompt(10, max_tokens=2))
        assert "blind: what n1 holds is not known (events-silent)" in response.headers["x-switchyard-reason"]
        assert any("n1" in line and "events-silent" in line for line in yard.gateway.degraded)
        text = await (await yard.http.get(f"{yard.url}/metrics")).text()
        assert 'switchyard_router_blind_decisions_total{cause="events-silent"} 1.0' in text
        assert yard.gateway.snapshot()["router"]["blind_decisions"] == {"events-silent": 1}


async def test_a_missing_tokenizer_is_said_instead_of_serving_blind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.gateway.gateway.RETRY_TOKENIZER_S", 0.05)
    place = tmp_path / "tokenizer"
    model = SYMBOLIC | {"tokenizer": "gguf", "tokenizer_path": str(place), "ids_per_block": 64, "tokens_per_id": 1}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document([], model=model)))
    async with running_gateway(file) as (gateway, _):
        await until(lambda: gateway.fault is not None, 20)
        with pytest.raises(Exception, match="cannot serve: tokenizer missing"):
            gateway.ready()
        assert any("tokenizer missing" in line for line in gateway.degraded)


async def test_new_conversations_one_at_a_time_spread_over_equal_nodes(tmp_path: Path) -> None:
    phases = {"n1": "prefill", "n2": "prefill", "n3": "prefill", "n4": "decode", "n5": "decode"}
    async with world(tmp_path, phases) as yard:
        nodes = []
        for number in range(6):
            response = await yard.complete(prompt(10, max_tokens=2, first_id=1000 * number))
            nodes.append((response.headers["x-switchyard-prefill-node"], response.headers["x-switchyard-decode-node"]))
            await yard.idle()
    assert sorted(prefill for prefill, _ in nodes) == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert sorted(decode for _, decode in nodes) == ["n4"] * 3 + ["n5"] * 3


async def test_requests_of_one_instant_spread_as_load_counts_from_the_decision(tmp_path: Path) -> None:
    phases = {"n1": "prefill", "n2": "prefill", "n3": "prefill", "n4": "decode", "n5": "decode", "n6": "decode"}
    async with world(tmp_path, phases, speed=1.0) as yard:
        bodies = [prompt(100, max_tokens=2, first_id=1000 * number) for number in range(3)]
        answers = await asyncio.gather(*(yard.complete(body) for body in bodies))
    assert sorted(answer.headers["x-switchyard-prefill-node"] for answer in answers) == ["n1", "n2", "n3"]
    assert sorted(answer.headers["x-switchyard-decode-node"] for answer in answers) == ["n4", "n5", "n6"]
