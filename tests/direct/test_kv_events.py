import msgspec
import pytest

from workers.direct.kv_events import BadEvent, Cleared, Removed, Stored, decode_message, decode_payload

STORED = {
    "type": "BlockStored",
    "block_hashes": [b"a" * 32, b"b" * 32],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}


def payload(*events, rank=0):
    return msgspec.msgpack.encode([1.5, list(events), rank])


def test_both_encodings_say_the_same():
    as_map = payload(
        STORED, {"type": "BlockRemoved", "block_hashes": [7], "medium": "gpu"}, {"type": "AllBlocksCleared"}
    )
    as_array = payload(
        ["BlockStored", [b"a" * 32, b"b" * 32], None, [1, 2, 3, 4], 2, None, "GPU"],
        ["BlockRemoved", [7], "gpu"],
        ["AllBlocksCleared"],
    )
    expected = [
        Stored([b"a" * 32, b"b" * 32], None, [1, 2, 3, 4], 2, "device", True),
        Removed([7], "device"),
        Cleared(),
    ]
    assert decode_payload(as_map) == decode_payload(as_array) == expected


def test_a_message_has_its_sequence_in_the_frame_before_the_last():
    number, events = decode_message([b"kv", (258).to_bytes(8, "big"), payload(STORED)])
    assert number == 258
    assert len(events) == 1


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("GPU", "device"), ("gpu", "device"), (None, "device"), ("CPU", "host"), ("cpu_pinned", "host")],
)
def test_the_medium_is_compared_without_case(medium, tier):
    (event,) = decode_payload(payload({**STORED, "medium": medium}))
    assert event.tier == tier


@pytest.mark.parametrize("extra", [{"lora_id": 3}, {"lora_name": "x"}, {"extra_keys": [None, ["image"]]}])
def test_blocks_that_more_than_tokens_decide_are_told_apart(extra):
    (event,) = decode_payload(payload({**STORED, **extra}))
    assert not event.plain


def test_kinds_and_fields_that_are_not_known_are_passed_over():
    assert decode_payload(payload({"type": "SomethingNew", "x": 1}, ["AlsoNew", 1], {**STORED, "new": 1}))[0].plain


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(3),
        msgspec.msgpack.encode([1.0]),
        payload(3),
        payload([]),
        payload({"no": "type"}),
        payload({**STORED, "token_ids": [1]}),
        payload({**STORED, "token_ids": [1, 2, 3, -4]}),
        payload({**STORED, "token_ids": "1234"}),
        payload({**STORED, "block_size": 0}),
        payload({**STORED, "block_hashes": ["text", "text"]}),
        payload({**STORED, "parent_block_hash": "text"}),
    ],
)
def test_what_is_not_an_event_is_refused(wrong):
    with pytest.raises(BadEvent):
        decode_payload(wrong)


def test_a_message_of_too_few_frames_is_refused():
    with pytest.raises(BadEvent):
        decode_message([payload(STORED)])
