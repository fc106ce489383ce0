"""`make bench-planner`: what the planner does for a cluster, simulated and with real nodes.

`python -m bench.planner [PART ...]` runs some of: initial, burst, shift, switches, hurtful (simulated), laptop (real nodes).
"""

from __future__ import annotations

import sys
import time

from bench import planner_laptop, planner_simulated
from bench.report import report

PARTS = {**planner_simulated.PARTS, "laptop": planner_laptop.main}


def main(names: list[str]) -> int:
    """Run the named parts (none: all). Answers the exit code."""
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        print(f"unknown part {unknown[0]!r}; expected some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for name in names or PARTS:
        began = time.process_time()
        PARTS[name]()
        report(f"{name}.cpu", time.process_time() - began, "s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
