from array import array

from apps.kvcache.domain.directory import Directory
from apps.kvcache.domain.hashing import extend_chain, root_hash
from workers.direct.assumed import AssumedCache
from workers.direct.kv_translation import OurStored

ROOT = root_hash("m", "bf16", "shared")


def chain(first, blocks):
    return extend_chain(ROOT, array("I", range(first, first + blocks)), 1)


def test_a_prompt_that_was_sent_is_assumed_to_be_there_once():
    cache = AssumedCache(100)
    assert cache.served(1.0, chain(0, 5)) == [OurStored(None, chain(0, 5))]
    assert cache.served(2.0, chain(0, 5)) == []
    assert cache.served(3.0, chain(0, 7)) == [OurStored(chain(0, 5)[-16:], chain(0, 7)[5 * 16 :])]


def test_memory_that_is_full_drops_what_was_used_longest_ago_and_the_directory_follows():
    cache, directory = AssumedCache(10), Directory(1000)
    for now, first in enumerate((0, 100, 0, 200)):
        for event in cache.served(float(now), chain(first, 5)):
            if isinstance(event, OurStored):
                assert directory.stored("n", "host", event.parent, event.chain, [])
            else:
                assert directory.removed("n", "host", event.hashes)
    held = {chain_of for _, chain_of in cache.segments()}
    assert held == {chain(0, 5), chain(200, 5)}
    assert directory.tree.held_blocks[directory.holder("n")] == 10


def test_an_empty_prompt_changes_nothing():
    assert AssumedCache(10).served(1.0, b"") == []
