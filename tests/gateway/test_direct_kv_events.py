"""KV events of existing engines, from a publisher's socket to where the next request goes: real tokens, both encodings."""

import asyncio
import contextlib
import json

import aiohttp
import pytest

from tests.direct.engine import Engine
from tests.direct.publisher import Publisher
from tests.gateway.direct_world import DirectWorld
from tests.gateway.world import document, node, running_gateway, until
from tools.ports import free_port
from workers.agent.engines.reference.tokenizer import load_tokenizer

BLOCK_TOKENS = 16
MODEL = {
    "name": "glm", "served_names": ["glm"], "tokenizer": "gguf", "tokenizer_path": None, "dtype": "bfloat16",
    "block_tokens": BLOCK_TOKENS, "ids_per_block": BLOCK_TOKENS, "tokens_per_id": 1, "context_tokens": 8192,
}  # fmt: skip
STORY = [{"role": "user", "content": "Once upon a time a signalman watched over a small yard by the sea. " * 30}]
# Its own system message: without one, the template begins every prompt with the same.
OTHER = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The tide rose and fell. " * 30}]


def ids(messages):
    tokenizer = load_tokenizer()
    return tokenizer.encode(tokenizer.render_chat(messages))


class World(DirectWorld):
    publishers: dict

    async def goes_to(self, messages):
        """The node that gets a request with these messages; and what the router had seen of the prefix, in its words."""
        response = await self.post({"model": "glm", "messages": messages})
        assert response.status == 200
        await self.idle()
        return response.headers["x-switchyard-prefill-node"]

    def held(self, name, messages):
        """How many leading blocks of these messages the gateway believes the node to hold."""
        prompt = self.serving.hasher.hash("engine", ids(messages))
        return self.serving.yard.kv.held(prompt).get(name, 0)


@contextlib.asynccontextmanager
async def world(folder, tagged=False, replay=True):
    """Two servers that do both phases; each publishes its KV events."""
    engines, publishers, nodes = {}, {}, []
    for order, name in enumerate(("v1", "v2")):
        engines[name] = Engine()
        await engines[name].listen()
        endpoint, again = f"tcp://*:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
        publishers[name] = (endpoint, again)
        told = {"kv_events": {"endpoint": endpoint, "replay": again if replay else None, "topic": "kv@"}}
        described = node(name, order, "mixed", engines[name].url) | {"engine": "vllm", "url": engines[name].url}
        nodes.append(described | {"direct": told})
    file = folder / "config.json"
    file.write_text(json.dumps(document(nodes, model=MODEL)))
    async with running_gateway(file) as (gateway, url), aiohttp.ClientSession() as http:
        await until(lambda: gateway.serving is not None, 60)
        await until(lambda: all(known.health == "ok" for known in gateway.ready().yard.fleet.nodes))
        made = World(gateway, url, http, engines)
        made.publishers = {name: Publisher(*at, BLOCK_TOKENS, tagged) for name, at in publishers.items()}
        await asyncio.sleep(0.3)  # a publisher that has just connected is not heard yet
        yield made
        for publisher in made.publishers.values():
            publisher.close()
        gateway.ready().yard.check_integrity()
    for double in engines.values():
        double.close()


@pytest.mark.parametrize("tagged", [False, True], ids=["maps", "tagged arrays"])
async def test_the_next_request_goes_where_its_prefix_lies(tmp_path, tagged):
    async with world(tmp_path, tagged) as here:
        assert await here.goes_to([{"role": "user", "content": "short"}]) == "v1"
        blocks = len(ids(STORY)) // BLOCK_TOKENS
        assert here.held("v2", STORY) == 0
        hashes = await here.publishers["v2"].stored(ids(STORY))
        await until(lambda: here.held("v2", STORY) == blocks)
        assert await here.goes_to(STORY) == "v2"
        shown = {entry["name"]: entry["pool_referenced_blocks"] for entry in here.gateway.snapshot()["nodes"]}
        assert (shown["v1"] < blocks, shown["v2"]) == (True, blocks)  # what the living branch counts on

        # The same context goes on, and a fork of it: their prefix is what counts.
        longer = [*STORY, {"role": "assistant", "content": "And then?"}, {"role": "user", "content": "The tide rose."}]
        assert 0 < here.held("v2", longer) <= blocks
        assert await here.goes_to(longer) == "v2"

        # Its end was evicted: the rest still counts. All of it: nothing is left to prefer.
        await here.publishers["v2"].removed(hashes[-3:])
        await until(lambda: here.held("v2", STORY) == blocks - 3)
        assert await here.goes_to(STORY) == "v2"
        await here.publishers["v2"].cleared()
        await until(lambda: here.held("v2", STORY) == 0)
        await here.publishers["v1"].stored(ids(STORY))
        await until(lambda: here.held("v1", STORY) == blocks)
        assert await here.goes_to(STORY) == "v1"


async def test_what_was_lost_on_the_way_is_asked_for_again(tmp_path):
    async with world(tmp_path) as here:
        publisher = here.publishers["v2"]
        await publisher.stored(ids(OTHER))
        await publisher.stored(ids(STORY), first_hash=5000, lost=True)
        await publisher.removed([1])
        await until(lambda: here.held("v2", STORY) > 0)
        assert publisher.asked == [1]
        assert await here.goes_to(STORY) == "v2"


async def test_without_replay_a_gap_makes_everything_before_it_unknown(tmp_path):
    async with world(tmp_path, replay=False) as here:
        publisher = here.publishers["v2"]
        await publisher.stored(ids(STORY))
        await until(lambda: here.held("v2", STORY) > 0)
        await publisher.removed([1], lost=True)
        await publisher.removed([2])
        await until(lambda: here.held("v2", STORY) == 0)
        await publisher.stored(ids(STORY), first_hash=9000)  # what follows builds it up again
        await until(lambda: here.held("v2", STORY) > 0)


async def test_an_engine_that_was_restarted_holds_nothing(tmp_path):
    async with world(tmp_path) as here:
        publisher = here.publishers["v2"]
        await publisher.stored(ids(STORY))
        await publisher.removed([1])
        await until(lambda: here.held("v2", STORY) > 0)
        publisher.restart()
        await publisher.stored(ids(OTHER))
        await until(lambda: here.held("v2", STORY) == 0)


async def test_blocks_of_other_sizes_than_ours_are_said_to_be_unknown(tmp_path):
    async with world(tmp_path) as here:
        here.publishers["v2"].block_tokens = 8
        await here.publishers["v2"].stored(ids(STORY))
        engine = here.serving.engines["v2"]
        await until(lambda: "not known" in engine.view)
        assert here.held("v2", STORY) == 0
