"""Anthropic's Messages API: a request as a chat body."""

from __future__ import annotations

from typing import Any

import msgspec

from workers.gateway.dialects import reading
from workers.gateway.dialects.reading import Json, unsupported, wrong

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_body(body: Json) -> dict[str, Any]:
    """The chat body that asks the same. Raises ApiError (400) naming the first bad field as the client spelled it."""
    chat: dict[str, Any] = {"model": reading.text(body, "model", "")}
    chat["messages"] = [*_system(body.get("system")), *_messages(body)]
    chat["max_tokens"] = reading.whole_number(body, "max_tokens", "", 1)
    reading.copied(body, chat, "temperature", "top_p", "top_k")
    stops = body.get("stop_sequences")
    if stops:
        if not isinstance(stops, list) or not all(isinstance(item, str) and item for item in stops):
            raise wrong("stop_sequences", "a list of non-empty texts")
        chat["stop"] = stops
    metadata = reading.section(body, "metadata", "")
    if metadata is not None and metadata.get("user_id") is not None:
        chat["user"] = reading.text(metadata, "user_id", "metadata.")
    _tools(body, chat)
    if reading.flag(body, "stream", "", False):
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    return chat


def count_body(body: Json) -> dict[str, Any]:
    """As `chat_body` for a request that only counts: it has no `max_tokens`."""
    return chat_body({**body, "max_tokens": 1, "stream": False})


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None or system == "" or system == []:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    parts = []
    for path, block in reading.objects(system, "system"):
        if block.get("type") != "text":
            raise wrong(f"{path}type", "'text'")
        parts.append(reading.text(block, "text", path))
    return [{"role": "system", "content": "\n".join(parts)}]


def _messages(body: Json) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("messages", "a list of at least one message")
    found: list[dict[str, Any]] = []
    for path, message in reading.objects(messages, "messages"):
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise wrong(f"{path}role", "'user' or 'assistant'")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif role == "user":
            found += _user(path, content)
        else:
            found.append(_assistant(path, content))
    return found


def _user(path: str, content: Any) -> list[dict[str, Any]]:
    """A user's message: what tools answered comes first, as messages of their own."""
    answers: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for at, block in reading.objects(content, f"{path}content"):
        if block.get("type") == "tool_result":
            answers.append(_tool_result(at, block))
        else:
            parts.append(_part(at, block))
    if not parts:
        return answers
    return [*answers, {"role": "user", "content": _shortest(parts)}]


def _assistant(path: str, content: Any) -> dict[str, Any]:
    texts, calls = [], []
    for at, block in reading.objects(content, f"{path}content"):
        kind = block.get("type")
        if kind == "text":
            texts.append(reading.text(block, "text", at))
        elif kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise wrong(f"{at}input", "an object")
            function = {
                "name": reading.text(block, "name", at),
                "arguments": msgspec.json.encode(block["input"]).decode(),
            }
            calls.append({"id": reading.text(block, "id", at), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            raise wrong(f"{at}type", "'text', 'tool_use' or 'thinking'")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None}
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_result(path: str, block: Json) -> dict[str, Any]:
    content = block.get("content")
    if content is None:
        content = ""
    elif not isinstance(content, str):
        content = _shortest([_part(at, part) for at, part in reading.objects(content, f"{path}content")])
    return {"role": "tool", "tool_call_id": reading.text(block, "tool_use_id", path), "content": content}


def _part(path: str, block: Json) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": reading.text(block, "text", path)}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(path, block)}}
    raise wrong(f"{path}type", "'text', 'image' or 'tool_result'")


def _image_url(path: str, block: Json) -> str:
    source = reading.section(block, "source", path)
    if source is None:
        raise wrong(f"{path}source", "an object")
    kind = source.get("type")
    if kind == "base64":
        media = reading.text(source, "media_type", f"{path}source.")
        return f"data:{media};base64,{reading.text(source, 'data', f'{path}source.')}"
    if kind == "url":
        return reading.text(source, "url", f"{path}source.")
    raise wrong(f"{path}source.type", "'base64' or 'url'")


def _shortest(parts: list[dict[str, Any]]) -> Any:
    """One text as a text: what engines and templates understand best."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts) if len(parts) != 1 else parts[0]["text"]
    return parts


def _tools(body: Json, chat: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools:
        chat["tools"] = [_tool(path, tool) for path, tool in reading.objects(tools, "tools")]
    choice = reading.section(body, "tool_choice", "")
    if choice is None:
        return
    kind = choice.get("type")
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": reading.text(choice, "name", "tool_choice.")}}
    elif kind in _TOOL_CHOICES:
        chat["tool_choice"] = _TOOL_CHOICES[kind]
    else:
        raise wrong("tool_choice.type", "'auto', 'any', 'tool' or 'none'")
    if reading.flag(choice, "disable_parallel_tool_use", "tool_choice.", False):
        chat["parallel_tool_calls"] = False


def _tool(path: str, tool: Json) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(f"{path}type", "tools that the server runs do not exist here, only your own")
    schema = reading.section(tool, "input_schema", path)
    if schema is None:
        raise wrong(f"{path}input_schema", "an object")
    function: dict[str, Any] = {"name": reading.text(tool, "name", path), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = reading.text(tool, "description", path)
    return {"type": "function", "function": function}
