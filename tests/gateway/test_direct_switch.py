"""Existing engines whose parts change while requests run."""

import asyncio
import copy
import json

from tests.gateway.direct_world import direct_world
from tests.gateway.world import until
from workers.yard.config import PartitionConfig

PAIR = {"v1": "prefill", "v2": "decode"}


def swapped(folder):
    document = copy.deepcopy(json.loads((folder / "config.json").read_text()))
    document["version"] += 1
    for node in document["nodes"]:
        node["phase"] = "decode" if node["phase"] == "prefill" else "prefill"
        node["generation"] += 1
    return PartitionConfig.parse(document)


async def test_the_gateway_shows_a_swap_at_once(tmp_path):
    async with direct_world(tmp_path, PAIR) as world:
        world.serving.apply(swapped(tmp_path))
        shown = {node["name"]: (node["phase"], node["generation"]) for node in world.gateway.snapshot()["nodes"]}
        assert shown == {"v1": ("decode", 1), "v2": ("prefill", 1)}
        response = await world.post(world.chat())
        assert response.headers["x-switchyard-prefill-node"] == "v2"
        await world.idle()


async def test_a_server_that_decodes_what_it_prefilled_itself_fetches_from_nobody(tmp_path):
    async with direct_world(tmp_path, PAIR) as world:
        world.engines["v1"].pause_s = 0.2
        asked = asyncio.create_task(world.post(world.chat(max_tokens=9)))
        await until(lambda: len(world.engines["v1"].bodies) == 1)
        world.serving.apply(swapped(tmp_path))
        response = await asked
        assert response.status == 200
        prefill, decode = world.engines["v1"].bodies
        assert prefill["kv_transfer_params"]["do_remote_decode"] is True
        assert ("kv_transfer_params" in decode, decode["max_tokens"]) == (False, 9)
        assert world.engines["v2"].bodies == []
        await world.idle()


async def test_what_runs_when_a_pair_swaps_ends_as_if_nothing_had_happened(tmp_path):
    async with direct_world(tmp_path, PAIR) as world:
        for double in world.engines.values():
            double.pause_s = 0.05
        asked = [asyncio.create_task(world.post(world.chat(stream=number % 2 == 0))) for number in range(12)]
        await until(lambda: len(world.engines["v2"].bodies) >= 1)
        world.serving.apply(swapped(tmp_path))
        assert [(await response).status for response in asked] == [200] * 12
        await world.idle()


async def test_sglangs_role_that_changed_by_itself_empties_what_is_known_of_it(tmp_path):
    async with direct_world(tmp_path, {"v1": "prefill", "v2": "prefill", "v3": "decode"}, "sglang") as world:
        await world.post(world.chat(messages=[{"role": "user", "content": "a long story " * 200}]))
        await until(lambda: world.serving.yard.kv.node_usage("v1")[0] > 0)
        world.engines["v1"].role = "decode"
        await until(lambda: world.serving.yard.fleet.nodes.get("v1").status.phase == "decode", 12)
        assert world.serving.yard.kv.node_usage("v1")[0] == 0
