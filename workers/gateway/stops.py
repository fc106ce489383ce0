"""Stop strings: text is held back exactly as long as it could still be the beginning of one."""

from __future__ import annotations


class StopMatcher:
    """Passes text through until one of `stops` appears; the stop string itself is never passed on.

    `push` answers `(text to send, matched)`. Text that may be the head of a stop string stays inside until the next
    `push` decides, or `flush` ends the answer.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        if not self._stops:
            return text, False
        buffer = self._held + text
        found = [at for at in (buffer.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return buffer[: min(found)], True
        keep = max(_overlap(buffer, stop) for stop in self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
