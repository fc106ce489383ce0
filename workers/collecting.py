"""When Python looks for cycles of garbage, in processes that make many short-lived objects and few cycles."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 25_000  # by default 700: a tenth of a gateway's time went into looking through objects that were in use
SIMULATED_YOUNG_OBJECTS = 250_000  # a simulated run makes millions of objects and no cycles among them
YOUNG_RUNS = 20
MIDDLE_RUNS = 20


def collect_seldom(young_objects: int = YOUNG_OBJECTS) -> None:
    """Takes what is there now as there for good, and looks for cycles a few dozen times less often (more seldom still with
    more `young_objects` in between).

    What is let go in the ordinary way is freed at once as ever. Say it when a process has started.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(young_objects, YOUNG_RUNS, MIDDLE_RUNS)
