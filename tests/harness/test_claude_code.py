"""The Claude Code hooks: what each tells the gateway, and that none of them can stop Claude Code."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import workers.harness.claude_code as package

FOLDER = Path(package.__file__).parent
SETTINGS = json.loads((FOLDER / "settings.json").read_text())
COMMON = {"session_id": "s-1", "transcript_path": "/t.jsonl", "cwd": "/project"}


async def run_hook(project: Path, event: Any, **environment: str) -> tuple[int, str]:
    """Runs the command that the configuration names for the event, as Claude Code does: through a shell."""
    name = event.get("hook_event_name", "SessionEnd") if isinstance(event, dict) else "SessionEnd"
    ((entry,),) = [group["hooks"] for group in SETTINGS["hooks"][name]]
    folder = project / ".claude" / "hooks"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(FOLDER / "hook.py", folder / "switchyard.py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = await asyncio.create_subprocess_shell(
        entry["command"],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": path, "CLAUDE_PROJECT_DIR": str(project)} | environment,
    )
    text = event if isinstance(event, str) else json.dumps(event)
    _, errors = await process.communicate(text.encode())
    return process.returncode or 0, errors.decode()


def test_the_configuration_covers_exactly_the_three_moments() -> None:
    assert set(SETTINGS["hooks"]) == {"SubagentStop", "PreCompact", "SessionEnd"}


@pytest.mark.parametrize(
    ("event", "ended", "announced"),
    [
        ({"hook_event_name": "SubagentStop", "agent_id": "a-7", "agent_type": "Explore"}, ["s-1/a-7"], []),
        ({"hook_event_name": "PreCompact", "trigger": "auto"}, [], [("s-1", {"rewritten": True})]),
        ({"hook_event_name": "SessionEnd", "reason": "exit"}, ["s-1"], []),
    ],
)
async def test_each_hook_tells_the_gateway(gateway, tmp_path: Path, event, ended, announced) -> None:
    done = await run_hook(tmp_path, COMMON | event, SWITCHYARD_GATEWAY=gateway.url, SWITCHYARD_API_KEY="secret")
    assert done == (0, "")
    assert (gateway.ended, gateway.announced) == (ended, announced)
    assert gateway.authorizations <= {"Bearer secret"}


async def test_the_addresses_of_claude_code_itself_are_understood(gateway, tmp_path: Path) -> None:
    event = COMMON | {"hook_event_name": "SessionEnd"}
    assert await run_hook(tmp_path, event, ANTHROPIC_BASE_URL=gateway.url, ANTHROPIC_AUTH_TOKEN="token") == (0, "")
    assert gateway.authorizations == {"Bearer token"}


async def test_a_branch_that_is_not_known_counts_as_ended(gateway, tmp_path: Path) -> None:
    gateway.end_status = 404
    event = COMMON | {"hook_event_name": "SessionEnd"}
    assert await run_hook(tmp_path, event, SWITCHYARD_GATEWAY=gateway.url, SWITCHYARD_API_KEY="k") == (0, "")


@pytest.mark.parametrize(
    ("event", "environment", "said"),
    [
        ("not json", {}, "expected a JSON object"),
        (COMMON | {"hook_event_name": "SessionEnd"}, {}, "set SWITCHYARD_GATEWAY"),
        (
            COMMON | {"hook_event_name": "SessionEnd"},
            {"SWITCHYARD_GATEWAY": "http://127.0.0.1:9", "SWITCHYARD_API_KEY": "k"},
            "the gateway was not told",
        ),
    ],
)
async def test_a_hook_never_stops_claude_code(tmp_path: Path, event, environment, said: str) -> None:
    code, errors = await run_hook(tmp_path, event, **environment)
    assert code == 1, "2 would block the action; anything else is shown and ignored"
    assert said in errors and "Traceback" not in errors


async def test_a_sub_agent_without_an_id_has_no_branch_to_end(gateway, tmp_path: Path) -> None:
    event = COMMON | {"hook_event_name": "SubagentStop"}
    assert await run_hook(tmp_path, event, SWITCHYARD_GATEWAY=gateway.url, SWITCHYARD_API_KEY="k") == (0, "")
    assert gateway.ended == []
