"""Real agent processes, every path, the small seeded model: the same tokens. `make exact` does it with SmolLM2."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from tools.exact import OUTPUT_TOKENS, Answer, Column, Prompt, make_prompts, matrix, prove


def free_ports(count: int) -> int:
    """The first of `count` neighbouring ports that are free now."""
    for first in range(20_000, 60_000, 97):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first))
            except OSError:
                continue
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, held in enumerate(sockets):
                held.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for held in sockets:
                held.close()
    raise AssertionError("no free ports")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_path_gives_the_same_tokens(tmp_path: Path) -> None:
    prompts = make_prompts(50, tiny=True)[2::11]
    paths = asyncio.run(prove(tmp_path, True, prompts, free_ports(3)))
    text, different = matrix(prompts, paths)
    assert not different, text
    spared = {path.name: sum(answer.spared_tokens for answer in path.answers) for path in paths}
    whole_blocks = sum((len(prompt.ids) - 1) // 16 * 16 for prompt in prompts)
    for name in ("own pool", "peer, memory", "peer, http", "dead peer", "adopted pool"):
        assert spared[name] >= whole_blocks, f"{name}: blocks were computed again"


def test_another_token_is_seen_in_the_matrix() -> None:
    prompts = make_prompts(2, tiny=True)
    good = [Answer([1] * OUTPUT_TOKENS), Answer([2] * OUTPUT_TOKENS)]
    bad = [Answer([1] * OUTPUT_TOKENS), Answer([2] * (OUTPUT_TOKENS - 1) + [3])]
    text, different = matrix(prompts, [Column("a", good), Column("b", bad)])
    assert different == 1
    assert text.count("X") == 1


def test_prompts_are_seeded_and_have_forks_and_long_ones() -> None:
    first, second = make_prompts(50, tiny=False), make_prompts(50, tiny=False)
    assert [prompt.ids for prompt in first] == [prompt.ids for prompt in second]
    assert max(len(prompt.ids) for prompt in first) >= 2000
    forks: list[Prompt] = [prompt for prompt in first if prompt.name.startswith("fork 96")]
    assert len({bytes(fork.ids[:96]) for fork in forks}) == 1
    assert len({bytes(fork.ids) for fork in forks}) == len(forks)
