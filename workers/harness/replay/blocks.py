"""Block ids of recorded prompts: run-length coded lists `((first id, count), ...)`, one id a full block."""

from __future__ import annotations

from itertools import chain

Runs = tuple[tuple[int, int], ...]

SESSION_ID_BITS = 20
"""A block id of a session takes this many low bits of a uint32; the session's number takes the rest."""

SESSION_NUMBERS = 1 << (32 - SESSION_ID_BITS)

TAIL_BLOCKS = 3
"""A prompt may differ from the one before in its last blocks without being a rewrite: the harness moved its own reminders."""


def count_blocks(runs: Runs) -> int:
    return sum(count for _, count in runs)


def prompt_ids(runs: Runs, session_number: int) -> list[int]:
    """The prompt as uint32 ids that no other session number shares."""
    base = (session_number % SESSION_NUMBERS) << SESSION_ID_BITS
    return list(chain.from_iterable(range(base + first, base + first + count) for first, count in runs))


def common_prefix_blocks(left: Runs, right: Runs) -> int:
    """How many leading blocks two prompts share; the runs may be cut in different places."""
    shared = 0
    i = j = 0
    done_left = done_right = 0
    while i < len(left) and j < len(right):
        (first_left, count_left), (first_right, count_right) = left[i], right[j]
        if first_left + done_left != first_right + done_right:
            break
        step = min(count_left - done_left, count_right - done_right)
        shared += step
        done_left += step
        done_right += step
        if done_left == count_left:
            i, done_left = i + 1, 0
        if done_right == count_right:
            j, done_right = j + 1, 0
    return shared


def is_rewrite(before: Runs, after: Runs) -> bool:
    """Whether `after` leaves more of `before` than its tail: the context was compacted or edited, not continued."""
    return count_blocks(before) - common_prefix_blocks(before, after) > TAIL_BLOCKS
