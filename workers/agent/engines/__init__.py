"""Engines behind one interface (`base.py`): `reference` (numpy Llama) and `simulated` (timing from coefficients).

Each engine's module has `build(spec: NodeSpec, context: EngineContext) -> Engine`; it is imported only when used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.agent.engines.base import Engine, EngineContext
    from workers.agent.spec import NodeSpec

ENGINES = {
    "reference": "workers.agent.engines.reference.engine",
    "simulated": "workers.agent.engines.simulated",
}


def build_engine(spec: NodeSpec, context: EngineContext) -> Engine:
    """The engine that the node's spec names. Raises SpecError for an unknown one."""
    from workers.agent.spec import SpecError

    module = ENGINES.get(spec.engine)
    if module is None:
        raise SpecError("nodes.engine", f"expected one of {', '.join(sorted(ENGINES))}, got {spec.engine!r}")
    engine: Engine = import_module(module).build(spec, context)
    return engine
