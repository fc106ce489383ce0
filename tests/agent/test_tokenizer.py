"""The default model's tokenizer: ids as recorded from an independent one, byte-exact text, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.agent.engines.reference.gguf_file import ModelFileError
from workers.agent.engines.reference.tokenizer import ChatTemplateError, Tokenizer, load_tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "smollm2_greedy.json").read_text())["prompts"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer()


def test_prompts_have_the_recorded_ids(tokenizer: Tokenizer) -> None:
    for prompt in RECORDED:
        assert tokenizer.encode(prompt["text"]).tolist() == prompt["token_ids"]


def test_chats_render_as_recorded(tokenizer: Tokenizer) -> None:
    for prompt in RECORDED:
        if prompt["chat"]:
            assert tokenizer.render_chat(prompt["chat"]) == prompt["text"]


# The model has no token for a few bytes (some control characters, and F1 and F2, which begin characters from U+40000).
ENCODABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d", exclude_categories=["Cs"]
)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=ENCODABLE, max_size=60))
def test_any_text_comes_back_whole_and_token_by_token(text: str) -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(text)
    if not set(ids) & tokenizer.special_ids:
        assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids] + [stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_cut_between_tokens_is_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("👩‍👩‍👧‍👦")
    stream = tokenizer.stream()
    pieces = [stream.push([token]) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "" in pieces, "some tokens complete no character"
    cut = tokenizer.stream()
    cut.push(ids[:1])
    assert cut.flush() == "\ufffd"


def test_control_tokens_add_no_text_and_end_tokens_are_known(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.token_bytes(10**6) == b""


def test_messages_that_the_template_does_not_take_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError):
        tokenizer.render_chat([{"role": "user"}])


def test_a_template_cannot_reach_python_internals() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.token_type": [1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.chat_template": "{{ messages.__class__.__mro__ }}",
    }
    with pytest.raises(ChatTemplateError):
        Tokenizer.from_gguf(metadata).render_chat([{"role": "user", "content": "x"}])


def test_a_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for content in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16):
        path.write_bytes(content)
        with pytest.raises(ModelFileError):
            load_tokenizer(path)
    with pytest.raises(ModelFileError):
        load_tokenizer(tmp_path / "missing.gguf")
