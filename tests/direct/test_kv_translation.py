import random
from array import array

from apps.kvcache.domain.directory import Directory
from apps.kvcache.domain.hashing import extend_chain, root_hash
from workers.direct.kv_events import Cleared, Removed, Stored
from workers.direct.kv_translation import KvTranslation, OurRemoved, OurStored

ROOT = root_hash("m", "bf16", "shared")


def stored(hashes, ids, parent=None, size=4, tier="device", plain=True):
    return Stored(hashes, parent, ids, size, tier, plain)


def chain(ids, block=4):
    return extend_chain(ROOT, array("I", ids), block)


def test_an_engines_blocks_become_ours_by_their_tokens():
    translation = KvTranslation(ROOT, 4)
    first, second = translation.translate([stored([1, 2], range(8)), stored([3], range(8, 12), parent=2)])
    whole = chain(range(12))
    assert first == OurStored("device", None, whole[:32])
    assert second == OurStored("device", whole[16:32], whole[32:])


def test_an_engine_block_may_be_several_of_ours():
    translation = KvTranslation(ROOT, 2)
    (first,) = translation.translate([stored([1], range(4))])
    assert first.chain == chain(range(4), 2)
    (gone,) = translation.translate([Removed([1], "device")])
    assert gone.hashes == first.chain[16:] + first.chain[:16]  # last one first


def test_blocks_that_do_not_fit_make_the_view_blind_and_say_why():
    translation = KvTranslation(ROOT, 3)
    assert translation.translate([stored([1], range(4))]) == []
    assert "4 tokens" in translation.blind


def test_a_run_whose_beginning_is_not_known_is_left_out_and_counted():
    translation = KvTranslation(ROOT, 4)
    assert translation.translate([stored([9], range(4), parent=8)]) == []
    assert translation.unknown_parents == 1


def test_blocks_that_more_than_tokens_decide_are_left_out():
    assert KvTranslation(ROOT, 4).translate([stored([1], range(4), plain=False)]) == []


def test_a_removal_of_what_is_not_held_says_nothing():
    assert KvTranslation(ROOT, 4).translate([Removed([1], "device")]) == []


def test_a_block_in_two_tiers_goes_from_one():
    translation = KvTranslation(ROOT, 4)
    translation.translate([stored([1], range(4)), stored([1], range(4), tier="host")])
    assert translation.translate([Removed([1], "device")]) == [OurRemoved("device", chain(range(4)))]
    (more,) = translation.translate([stored([2], range(4, 8), parent=1, tier="host")])
    assert more.parent == chain(range(4))


def test_clearing_takes_everything_from_the_directory():
    translation = KvTranslation(ROOT, 4)
    translation.translate([stored([1, 2], range(8)), stored([5], range(4), tier="host")])
    gone = translation.translate([Cleared()])
    assert {event.tier: len(event.hashes) for event in gone} == {"device": 32, "host": 16}
    assert translation.blocks == 0


def test_the_content_can_be_told_again_parents_first():
    translation = KvTranslation(ROOT, 4)
    translation.translate([stored([1, 2], range(8)), stored([3], range(8, 12), parent=2)])
    directory = Directory(10_000)
    for parent, run in translation.segments("device"):
        assert directory.stored("n", "device", parent, run, [])


def test_random_events_leave_directory_and_translation_with_the_same_blocks():
    rng = random.Random(3)
    translation, directory = KvTranslation(ROOT, 4), Directory(10_000)
    held, number = {}, 0
    for _ in range(400):
        if held and rng.random() < 0.4:
            # engines free a context's blocks from its end
            name = rng.choice([name for name in held if not any(parent == name for parent in held.values())])
            del held[name]
            events = [Removed([name], "device")]
        else:
            parent = rng.choice([None, *held])
            number += 1
            held[number] = parent
            events = [stored([number], [number] * 4, parent=parent)]
        for event in translation.translate(events):
            if isinstance(event, OurStored):
                directory.stored("n", event.tier, event.parent, event.chain, [])
            else:
                directory.removed("n", event.tier, event.hashes)
    assert translation.blocks == len(held)
    assert directory.tree.held_blocks[directory.holder("n", "device")] == len(held)
