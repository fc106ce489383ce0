import random
from array import array

from apps.kvcache.domain.directory import Directory
from apps.kvcache.domain.hashing import extend_chain, root_hash
from workers.direct.kv_events import Cleared, Removed, Stored
from workers.direct.kv_translation import KvTranslation, OurRemoved, OurStored

ROOT = root_hash("m", "bf16", "shared")


def stored(hashes, ids, parent=None, size=4, tier="device", plain=True):
    return Stored(hashes, parent, ids, size, tier, plain)


def gone(*hashes, tier="device"):
    return Removed(list(hashes), tier)


def chain(ids, block=4):
    return extend_chain(ROOT, array("I", ids), block)


def test_an_engines_blocks_become_ours_by_their_tokens():
    translation = KvTranslation(ROOT, 4)
    first, second = translation.translate([stored([1, 2], range(8)), stored([3], range(8, 12), parent=2)])
    whole = chain(range(12))
    assert first == OurStored(None, whole[:32])
    assert second == OurStored(whole[16:32], whole[32:])


def test_an_engine_block_may_be_several_of_ours():
    translation = KvTranslation(ROOT, 2)
    (first,) = translation.translate([stored([1], range(4))])
    assert first.chain == chain(range(4), 2)
    assert translation.translate([gone(1)]) == [OurRemoved(first.chain[16:] + first.chain[:16])]  # last one first


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
    assert KvTranslation(ROOT, 4).translate([gone(1)]) == []


def test_a_block_in_two_tiers_is_told_once_and_goes_with_the_last():
    translation = KvTranslation(ROOT, 4)
    told = translation.translate([stored([1], range(4)), stored([1], range(4), tier="host"), gone(1)])
    assert told == [OurStored(None, chain(range(4)))]
    (more,) = translation.translate([stored([2], range(4, 8), parent=1, tier="host")])
    assert more.parent == chain(range(4))
    assert translation.translate([gone(1, tier="host")]) == [OurRemoved(chain(range(8))[16:] + chain(range(4)))]


def test_the_end_of_a_context_is_of_no_use_without_its_middle_until_that_is_back():
    translation = KvTranslation(ROOT, 4)
    translation.translate([stored([1, 2, 3], range(12))])
    whole = chain(range(12))
    assert translation.translate([gone(2)]) == [OurRemoved(whole[32:] + whole[16:32])]
    assert translation.told_blocks == 1
    assert translation.translate([stored([2], range(4, 8), parent=1)]) == [OurStored(whole[:16], whole[16:])]
    assert translation.told_blocks == 3


def test_blocks_after_a_lost_middle_may_go_too_and_nothing_is_remembered():
    translation = KvTranslation(ROOT, 4)
    translation.translate([stored([1, 2, 3], range(12)), gone(1), gone(2), gone(3)])
    assert translation.told_blocks == 0
    assert translation._blocks == {} == translation._after


def test_clearing_takes_everything_from_the_directory():
    translation = KvTranslation(ROOT, 4)
    translation.translate([stored([1, 2], range(8)), stored([5], range(50, 54), tier="host")])
    (told,) = translation.translate([Cleared()])
    assert len(told.hashes) == 48
    assert translation.translate([Cleared()]) == []


def test_the_content_can_be_told_again_parents_first():
    translation = KvTranslation(ROOT, 4)
    translation.translate(
        [stored([1, 2], range(8)), stored([3], range(8, 12), parent=2), stored([4], range(4), parent=1)]
    )
    directory = Directory(10_000)
    for parent, run in translation.segments():
        assert directory.stored("n", "host", parent, run, [])
    assert directory.tree.held_blocks[directory.holder("n")] == 4


def test_random_events_leave_the_directory_with_the_prefixes_the_engine_holds():
    """Blocks go in any order, also from the middle; the directory never has to doubt what it is told."""
    rng = random.Random(3)
    translation, directory = KvTranslation(ROOT, 4), Directory(10_000)
    before, held, number = {None: None}, set(), 0
    for _ in range(1500):
        kind = rng.random()
        if kind < 0.45 and held:
            name = rng.choice(sorted(held))
            held.discard(name)
            events = [gone(name)]
        elif kind < 0.6 and len(before) > 1:
            name = rng.choice([name for name in before if name is not None])  # computed again
            if name not in translation._blocks or (
                before[name] is not None and before[name] not in translation._blocks
            ):
                continue
            held.add(name)
            events = [stored([name], [name] * 4, parent=before[name])]
        else:
            parent = rng.choice([None, *sorted(held)])
            number += 1
            before[number] = parent
            held.add(number)
            events = [stored([number], [number] * 4, parent=parent)]
        for event in translation.translate(events):
            if isinstance(event, OurStored):
                assert directory.stored("n", "host", event.parent, event.chain, [])
            else:
                assert directory.removed("n", "host", event.hashes)
        useful = {name for name in held if all(upper in held for upper in path(before, name))}
        assert translation.told_blocks == len(useful)
        assert directory.tree.held_blocks[directory.holder("n")] == len(useful)


def path(before, name):
    while name is not None:
        yield name
        name = before[name]
