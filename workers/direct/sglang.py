"""Hand-over between SGLang servers (0.5.23): both legs get one body with the same `bootstrap_host`, `_port`, `_room`.

The two legs meet in a room at the prefill server's bootstrap service. A room that is used twice at a time crashes both
schedulers, so rooms come from `Rooms`, are never given twice while in use, and a failed leg's call is not repeated with its
room.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.direct.bodies import with_fields

ROOM_LIMIT = 2**63 - 1
DEFAULT_BOOTSTRAP_PORT = 8998


class Rooms:
    """Gives out rooms. `draw(limit)` is a source of random numbers in [0, limit): gateways that share servers must not
    count from the same start."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._used: set[int] = set()

    @property
    def in_use(self) -> int:
        return len(self._used)

    def take(self) -> int:
        """A room nobody is in."""
        while True:
            room = self._draw(ROOM_LIMIT)
            if room not in self._used:
                self._used.add(room)
                return room

    def leave(self, room: int) -> None:
        """Both legs are over."""
        self._used.discard(room)


def leg_body(body: bytes, host: str, port: int, room: int) -> bytes:
    """The body of both legs."""
    return with_fields(body, {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room})
