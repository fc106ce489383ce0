"""Compiled twins of the hot modules, used where they were built (`make compiled`) from exactly these sources.

The sources remain what counts: where a single one of them differs from what was compiled, or another Python runs, all of
them run as they are. `SWITCHYARD_COMPILED=0` says so at will.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compiled"
HOT = (
    "apps/flowcontrol/domain",
    "apps/kvcache/domain",
    "apps/routing/domain",
    "apps/planning/domain/cost_model.py",
    "workers/yard",
    # what a request passes in the gateway
    "workers/http/client.py",
    "workers/http/exchange.py",
    "workers/http/server.py",
    "workers/http/wire.py",
    "workers/direct/bodies.py",
    "workers/gateway/counts.py",
    "workers/gateway/direct_front.py",
    "workers/gateway/direct_upstream.py",
    "workers/gateway/driver.py",
    "workers/gateway/event_stream.py",
    "workers/gateway/light_body.py",
    "workers/gateway/metrics.py",
    "workers/gateway/relay.py",
    "workers/gateway/serving.py",
    "workers/gateway/session.py",
    "workers/gateway/signals.py",
    "workers/gateway/web.py",
    # and in the simulator
    "workers/agent/engines/simulated_decode_loop.py",
    "workers/agent/engines/simulated_node.py",
    "workers/agent/engines/simulated_prefill_loop.py",
    "workers/simulator/clock.py",
    "workers/simulator/node.py",
    "workers/simulator/node_core.py",
    "workers/simulator/node_decode.py",
    "workers/simulator/node_parts.py",
    "workers/simulator/node_prefill.py",
    "workers/simulator/partition.py",
)
LEFT_OUT = frozenset(("__init__.py", "fields.py"))  # `fields` reads what people write: of any type


def sources() -> list[Path]:
    """The files that have twins, relative to the root."""
    found: list[Path] = []
    for name in HOT:
        path = ROOT / name
        found += sorted(path.glob("*.py")) if path.is_dir() else [path]
    return [path.relative_to(ROOT) for path in found if path.name not in LEFT_OUT]


def digest() -> str:
    """Of the sources and of the Python that runs."""
    told = hashlib.sha256(f"{sys.implementation.cache_tag} {sys.platform}".encode())
    for path in sources():
        told.update(str(path).encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return told.hexdigest()


class _Twins:
    """Finds the modules that were compiled, and the library that they have in common."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        twin = self._modules.get(name)
        return None if twin is None else spec_from_file_location(name, FOLDER / twin)


def use() -> str:
    """Puts the twins in use before any of the modules is imported; answers `compiled`, or why not."""
    if os.environ.get("SWITCHYARD_COMPILED") == "0":
        return "interpreted: SWITCHYARD_COMPILED=0"
    try:
        built = json.loads((FOLDER / "manifest.json").read_text())
        if built["digest"] != digest():
            return "interpreted: the sources changed since `make compiled`"
        sys.meta_path.insert(0, _Twins(built["modules"]))
    except FileNotFoundError:
        return "interpreted: `make compiled` was not run"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"interpreted: what was compiled cannot be read ({type(error).__name__})"
    return "compiled"
