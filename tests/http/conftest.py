"""Both event loops: processes run on uvloop, whose transports differ in small things."""

import asyncio

import pytest
import uvloop


def pytest_asyncio_loop_factories(config, item):
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """`asyncio.run` on either loop, for tests that are not coroutines themselves."""
    return uvloop.run if request.param == "uvloop" else asyncio.run
