"""Bodies that are read lightly: whatever a client sends is either what an engine may take or a 400 that names the field."""

from types import SimpleNamespace

import pytest

from workers.gateway import light_body
from workers.gateway.direct_front import _ids
from workers.gateway.errors import ApiError


def ids(fields: bytes, chat: bool, by_text: bool) -> list[int]:
    codec = SimpleNamespace(encode=lambda text: list(text.encode()), encode_chat=lambda told: list(str(told).encode()))
    serving = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(by_text=by_text)), codec=codec)
    return list(_ids(serving, light_body.read(b'{"model":"m",%b}' % fields, chat), chat))


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize(
    "prompt", [b'"a"', b'"Hi"', b'"abc"', b'["a"]', b'["a","b"]', b"[7]", b"[[1,2],[3]]", b"[ [1,2] ]", b'[ "a" ]']
)
def test_a_prompt_may_be_short_or_several(prompt: bytes, by_text: bool) -> None:
    assert ids(b'"prompt":' + prompt, False, by_text)


@pytest.mark.parametrize("by_text", [True, False])
@pytest.mark.parametrize(
    "prompt",
    [b"null", b"true", b"3", b"12345678", b"{}", b'{"text":"abcdefgh"}', b'""', b"[]", b"[ ]", b'[1,"a"]', b"[1.5]", b"[-1]",
     b"[4294967296]", b"[null]", b'[{"a":1}]', b'"\\ud800"'],
)  # fmt: skip
def test_a_prompt_of_another_kind_is_refused(prompt: bytes, by_text: bool) -> None:
    with pytest.raises(ApiError) as refused:
        ids(b'"prompt":' + prompt, False, by_text)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        (b'"prompt":"abcdefgh\xff"', False),
        (b'"messages":[{"role":"user","content":"\xff\xfe"}]', True),
        (b'"messages":[{"role":"user","content":"a\xc3"}]', True),
        (b'"messages":[{"\xff":1}]', True),
        (b'"messages":[1]', True),
        (b'"messages":"abc"', True),
        (b'"messages":[null]', True),
    ],
)
def test_what_is_no_text_is_refused_where_its_tokens_are_needed(fields: bytes, chat: bool) -> None:
    with pytest.raises(ApiError) as refused:
        ids(fields, chat, by_text=False)
    assert (refused.value.status, refused.value.param) == (400, "messages" if chat else "prompt")


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (b'{"model":"a","model":"b","messages":[]}', ("b", None)),
        (b'{"\\u006dodel":"b","\\u0073tream":true,"messages":[]}', ("b", True)),
        (b'{"model":"b","stream":true,"stream":false,"messages":[]}', ("b", False)),
    ],
)
def test_names_are_read_as_the_engine_reads_them(body: bytes, read: tuple[str, bool | None]) -> None:
    found = light_body.read(body, chat=True)
    assert (found.model, found.stream) == read


@pytest.mark.parametrize(
    "body",
    [
        b'\xef\xbb\xbf{"model":"b","messages":[]}',
        b'{"model":"b","messages":[],"temperature":NaN}',
        b'{"model":"b","messages":[],"max_tokens":1e400}',
        b'{"model":"b","messages":[],"max_tokens":-9223372036854775809}',
        b'{"model":"b","messages":[],"max_tokens":1.5}',
        b'{"model":"b","messages":[],"stream":"true"}',
        b'{"model":"b","messages":[],"stream":1}',
        b'{"model":"b","messages":[]}{}',
        b'{"model":"b","messages":[]}\x00',
        b'{"model":"\\ud800","messages":[]}',
        b'{"model":"\xff","messages":[]}',
        '{"model":"b","messages":[]}'.encode("utf-16"),
        b"",
        b"null",
    ],
)
def test_a_body_that_cannot_be_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        light_body.read(body, chat=True)
    assert refused.value.status == 400
