import json

import msgspec
import pytest

from workers.direct import sglang, vllm
from workers.direct.bodies import with_fields


@pytest.mark.parametrize(
    "body", [b'{"a":1}', b' {"a": 1 } \n', b'{"a":1,"t":"}"}', b"{}", b" { } ", '{"a":"é\\u00e9"}'.encode()]
)
def test_fields_are_added_and_the_rest_stays_as_it_came(body):
    assert json.loads(with_fields(body, {"x": [1, None]})) == {**json.loads(body), "x": [1, None]}
    assert with_fields(body, {"x": 1}).startswith(body.rstrip()[:-1].rstrip())


def test_an_added_field_counts_instead_of_the_clients():
    assert json.loads(with_fields(b'{"stream": true, "max_tokens": 100}', {"stream": False}))["stream"] is False


def test_without_fields_nothing_is_changed():
    assert with_fields(b'{ "a":1}\n', {}) == b'{ "a":1}\n'


@pytest.mark.parametrize("body", [b"", b"[]", b'"x"', b"{", b"}"])
def test_what_is_not_an_object_is_refused(body):
    with pytest.raises(ValueError, match="object"):
        with_fields(body, {"x": 1})


def test_vllms_prefill_leg_computes_one_token_whatever_the_client_wants():
    body = b'{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"max_completion_tokens":9,"tools":[{}]}'
    sent = json.loads(vllm.prefill_body(body))
    assert (sent["max_tokens"], sent["max_completion_tokens"], sent["stream"], sent["stream_options"]) == (
        1,
        1,
        False,
        None,
    )
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    assert sent["kv_transfer_params"]["do_remote_prefill"] is False
    assert sent["tools"] == [{}]


def test_vllms_hand_over_goes_to_the_decode_leg_byte_for_byte():
    params = b'{"remote_block_ids":[1,2],  "remote_engine_id":"x","unknown":1e3,"do_remote_prefill":true}'
    answer = b'{"id":"a","choices":[],"kv_transfer_params":' + params + b"}"
    assert vllm.handoff(answer) == params
    assert vllm.decode_body(b'{"model":"m"}', params) == b'{"model":"m","kv_transfer_params":' + params + b"}"


@pytest.mark.parametrize("answer", [b"{}", b'{"kv_transfer_params":null}', b"nonsense", b"[]"])
def test_a_vllm_server_without_a_connector_is_found_out(answer):
    with pytest.raises(vllm.HandoffMissing):
        vllm.handoff(answer)


def test_sglangs_legs_get_the_same_room():
    sent = msgspec.json.decode(sglang.leg_body(b'{"model":"m","bootstrap_room":1}', "10.0.0.1", 8998, 7))
    assert sent == {"model": "m", "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}


def test_a_room_in_use_is_never_given_again():
    numbers = iter([5, 5, 5, 6, 5])
    rooms = sglang.Rooms(lambda limit: next(numbers))
    assert [rooms.take(), rooms.take()] == [5, 6]
    rooms.leave(5)
    assert rooms.take() == 5
    assert rooms.in_use == 2
