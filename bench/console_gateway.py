"""What stands for a large partition's gateway in `bench.console`: its operator API (docs/interfaces.md, section 6b) with
2,000 waiting requests, hundreds of branches and reuse by 768 nodes, answered from texts that were made before.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

WAITING = 2000
BRANCHES = 400
LOST = {"evicted": 900, "routed": 100, "switched": 10, "fetch-failed": 1, "never-stored": 5}


def _request(i: int, tenants: int) -> dict[str, Any]:
    return {
        "id": f"req-{i:08d}-0000-0000", "tenant": f"tenant-{i % tenants}", "band": "standard", "flow": f"flow-{i % 200}",
        "objective": "standard", "branch": f"tenant-{i % tenants}/session-{i}", "branch_kind": "continuation",
        "stage": "queued", "arrived_at": time.time() - 30, "age_s": 30.0, "ttl_s": 60.0, "prompt_tokens": 50_000,
        "uncached_tokens": 5000, "output_tokens": 0, "max_tokens": 800, "prefill_node": None, "decode_node": None,
        "queue_s": None, "predicted_ttft_s": None, "waiting_for": "a prefill place", "reason": "prefill is full",
    }  # fmt: skip


def _branch(i: int, nodes: int, tenants: int) -> dict[str, Any]:
    tenant = f"tenant-{i % tenants}"
    return {
        "id": f"{tenant}/session-{i}", "parent": f"tenant-{(i - 1) % tenants}/session-{i - 1}" if i % 4 else None,
        "kind": "subagent" if i % 4 else "new", "version": 1, "inferred": False, "program": "agent", "tenant": tenant,
        "blocks": 800, "homes": {"prefill": f"bench-{i % nodes}", "decode": f"bench-{(i + 7) % nodes}"},
        "held": {f"bench-{(i + n) % nodes}": 800 - 100 * n for n in range(4)}, "shared_blocks": 20, "produced_blocks": 9,
        "gone": {"evicted": 12}, "idle_s": 3.0, "pause_s": 9.0, "open_requests": [], "lease_left_s": 500.0,
        "held_by_subagents": False,
    }  # fmt: skip


def _totals(i: int) -> dict[str, Any]:
    lost = dict(LOST)
    return {"prompt_tokens": 10**6 + i, "ideal_tokens": 9 * 10**5, "actual_tokens": 8 * 10**5, "lost": lost}


def answers(nodes: int, tenants: int) -> dict[str, list[Any]]:
    return {
        "requests": [_request(i, tenants) for i in range(WAITING)],
        "branches": [_branch(i, nodes, tenants) for i in range(BRANCHES)],
        "reuse": [
            {
                "total": _totals(0),
                "by": {
                    "node": {f"bench-{i}": _totals(i) for i in range(nodes)},
                    "tenant": {f"tenant-{i}": _totals(i) for i in range(tenants)},
                    "workload": {f"workload-{i}": _totals(i) for i in range(40)},
                },
                "pools": {f"bench-{i}": {"known_blocks": 900, "referenced_blocks": 400} for i in range(nodes)},
            }
        ],
    }


def main(port: int, nodes: int, tenants: int) -> None:
    found = answers(nodes, tenants)
    encoded: dict[tuple[str, int], bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            split = urlsplit(self.path)
            name = split.path.rpartition("/")[2]
            limit = int(parse_qs(split.query).get("limit", ["100"])[0])
            body = encoded.get((name, limit)) or encoded.setdefault((name, limit), _body(name, found[name], limit))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def _body(name: str, rows: list[Any], limit: int) -> bytes:
    if name == "reuse":
        return json.dumps(rows[0]).encode()
    document: dict[str, Any] = {"total": len(rows), "rows": rows[:limit]}
    if name == "branches":
        closed = [{"id": f"tenant-0/old-{i}", "t": time.time(), "cause": "ended", "blocks": 100} for i in range(200)]
        document |= {"live": len(rows), "block_tokens": 64, "closed": closed}
    else:
        document["waiting"] = len(rows)
    return json.dumps(document).encode()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
