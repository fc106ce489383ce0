"""Requests that are over are freed at once: what waited for a collection of cycles would cost every gateway that is busy."""

import asyncio
import gc

import pytest

from tests.gateway.direct_world import direct_world
from tests.gateway.world import KEY

KINDS = {
    "whole": ({"v1": "mixed"}, "vllm"),
    "vllm pair": ({"v1": "prefill", "v2": "decode"}, "vllm"),
    "sglang pair": ({"v1": "prefill", "v2": "decode"}, "sglang"),
}
PER_REQUEST = {
    "Relay",
    "Exchange",
    "Request",
    "AnswerLeg",
    "PrefillLeg",
    "RoomLeg",
    "Call",
    "RequestState",
    "EventStream",
}


def left_behind():
    """Names of the gateway's objects of one request that only a collection frees."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted({type(thing).__name__ for thing in gc.garbage} & PER_REQUEST)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_leave_no_cycles(tmp_path, kind):
    phases, engine = KINDS[kind]
    async with direct_world(tmp_path, phases, engine) as world:
        for stream in (False, True):
            await world.post(world.chat(stream=stream))  # connections are made
        await asyncio.sleep(0.1)
        gc.collect()
        gc.disable()
        try:
            for number in range(4):
                response = await world.post(world.chat(stream=number % 2 == 0))
                assert response.status == 200
            del response
            await world.idle()
            await asyncio.sleep(0.1)
            assert left_behind() == []
        finally:
            gc.enable()


async def test_a_client_that_left_leaves_no_cycle(tmp_path):
    async with direct_world(tmp_path, pause_s=0.05) as world:
        gc.collect()
        gc.disable()
        try:
            headers = {"authorization": f"Bearer {KEY}"}
            response = await world.http.post(
                f"{world.url}/v1/chat/completions", json=world.chat(stream=True), headers=headers
            )
            response.close()
            del response
            await world.idle()
            await asyncio.sleep(0.1)
            assert left_behind() == []
        finally:
            gc.enable()
