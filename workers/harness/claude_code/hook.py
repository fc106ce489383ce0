#!/usr/bin/env python3
"""A Claude Code hook: tells Switchyard's gateway that a sub-agent stopped, a context will be compacted, or a session ended.

Claude Code gives the event as JSON on standard input. The gateway is SWITCHYARD_GATEWAY or ANTHROPIC_BASE_URL, the key
SWITCHYARD_API_KEY, ANTHROPIC_AUTH_TOKEN or ANTHROPIC_API_KEY. It never stops Claude Code from going on: a gateway that does
not answer within two seconds is named on standard error, and the branch's lease does the rest.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

TIMEOUT_S = 2.0
WENT_WRONG = 1
"""Claude Code shows standard error and goes on; only 2 would stop it."""


def call_for(event: dict[str, Any]) -> tuple[str, str, dict[str, Any]] | None:
    """(method, path, body) that tells the gateway of the event; None when it has nothing to tell."""
    session, agent = event.get("session_id"), event.get("agent_id")
    name = event.get("hook_event_name")
    if not isinstance(session, str) or not session:
        return None
    if name == "PreCompact":
        branch = f"{session}/{agent}" if agent else session
        return "PUT", _path(branch), {"rewritten": True}
    if name == "SubagentStop" and agent:
        return "POST", _path(f"{session}/{agent}") + "/end", {}
    if name == "SessionEnd":
        return "POST", _path(session) + "/end", {}
    return None


def _path(branch: str) -> str:
    return "/v1/branches/" + urllib.parse.quote(branch, safe="")


def _first(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def main() -> int:
    try:
        event = json.load(sys.stdin)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        return _say("expected a JSON object on standard input")
    call = call_for(event)
    if call is None:
        return 0
    gateway = _first("SWITCHYARD_GATEWAY", "ANTHROPIC_BASE_URL")
    key = _first("SWITCHYARD_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_API_KEY")
    if not gateway.startswith(("http://", "https://")) or not key:
        return _say("set SWITCHYARD_GATEWAY to the gateway's http address and SWITCHYARD_API_KEY to its key")
    method, path, body = call
    request = urllib.request.Request(  # noqa: S310 (checked above)
        gateway.rstrip("/") + path,
        data=json.dumps(body).encode(),
        method=method,
        headers={"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310
            return 0
    except urllib.error.HTTPError as refusal:
        with refusal:
            return (
                0 if refusal.code == 404 else _say(f"{event['hook_event_name']}: the gateway answered {refusal.code}")
            )
    except OSError as problem:
        return _say(f"{event['hook_event_name']}: the gateway was not told: {problem}")


def _say(problem: str) -> int:
    sys.stderr.write(f"switchyard: {problem}\n")
    return WENT_WRONG


if __name__ == "__main__":
    sys.exit(main())
