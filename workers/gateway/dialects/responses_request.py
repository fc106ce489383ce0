"""OpenAI's Responses API: a request as a chat body. Nothing is stored, so what needs stored responses is refused."""

from __future__ import annotations

from typing import Any

from workers.gateway.dialects import reading
from workers.gateway.dialects.reading import Json, unsupported, wrong

_ROLES = ("user", "assistant", "system", "developer")


def chat_body(body: Json) -> dict[str, Any]:
    """The chat body that asks the same. Raises ApiError (400) naming the first bad field as the client spelled it."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise unsupported(name, "responses are not stored here; send the whole conversation as 'input'")
    if reading.flag(body, "background", "", False):
        raise unsupported("background", "responses are not stored here")
    chat: dict[str, Any] = {"model": reading.text(body, "model", ""), "messages": _messages(body)}
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = reading.whole_number(body, "max_output_tokens", "", 1)
    reading.copied(body, chat, "temperature", "top_p", "user", "parallel_tool_calls", "metadata")
    reasoning = reading.section(body, "reasoning", "")
    if reasoning is not None and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reading.text(reasoning, "effort", "reasoning.")
    _format(body, chat)
    _tools(body, chat)
    if reading.flag(body, "stream", "", False):
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    return chat


def _messages(body: Json) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    instructions = reading.optional_text(body, "instructions", "")
    if instructions:
        messages.append({"role": "system", "content": instructions})
    given = body.get("input")
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise wrong("input", "a text or a list of at least one item")
    for path, item in reading.objects(given, "input"):
        _item(path, item, messages)
    return messages


def _item(path: str, item: Json, messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise wrong(f"{path}role", "'user', 'assistant', 'system' or 'developer'")
        messages.append({"role": role, "content": _content(path, item.get("content"))})
    elif kind == "function_call":
        function = {"name": reading.text(item, "name", path), "arguments": reading.text(item, "arguments", path)}
        call = {"id": reading.text(item, "call_id", path), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = item.get("output")
        told = output if isinstance(output, str) else _content(path, output, "output")
        messages.append({"role": "tool", "tool_call_id": reading.text(item, "call_id", path), "content": told})
    elif kind != "reasoning":
        raise unsupported(f"{path}type", f"{kind!r} items do not exist here")


def _content(path: str, content: Any, name: str = "content") -> Any:
    if isinstance(content, str):
        return content
    parts = [_part(at, part) for at, part in reading.objects(content, f"{path}{name}")]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(path: str, part: Json) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": reading.text(part, "text", path)}
    if kind == "refusal":
        return {"type": "text", "text": reading.text(part, "refusal", path)}
    if kind == "input_image":
        url: dict[str, Any] = {"url": reading.text(part, "image_url", path)}
        if part.get("detail") is not None:
            url["detail"] = reading.text(part, "detail", path)
        return {"type": "image_url", "image_url": url}
    raise wrong(f"{path}type", "'input_text', 'output_text' or 'input_image'")


def _format(body: Json, chat: dict[str, Any]) -> None:
    wanted = reading.section(body, "text", "")
    form = reading.section(wanted, "format", "text.") if wanted is not None else None
    if form is None or form.get("type") == "text":
        return
    if form.get("type") == "json_object":
        chat["response_format"] = {"type": "json_object"}
    elif form.get("type") == "json_schema":
        schema = {
            name: form[name] for name in ("name", "schema", "strict", "description") if form.get(name) is not None
        }
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    else:
        raise wrong("text.format.type", "'text', 'json_object' or 'json_schema'")


def _tools(body: Json, chat: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools:
        chat["tools"] = [_tool(path, tool) for path, tool in reading.objects(tools, "tools")]
    choice = body.get("tool_choice")
    if choice is None:
        return
    if isinstance(choice, dict) and choice.get("type") == "function":
        chat["tool_choice"] = {"type": "function", "function": {"name": reading.text(choice, "name", "tool_choice.")}}
    elif choice in ("auto", "required", "none"):
        chat["tool_choice"] = choice
    else:
        raise wrong("tool_choice", "'auto', 'required', 'none' or a function")


def _tool(path: str, tool: Json) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"{path}type", "tools that the server runs do not exist here, only your own functions")
    function: dict[str, Any] = {"name": reading.text(tool, "name", path)}
    reading.copied(tool, function, "description", "parameters", "strict")
    return {"type": "function", "function": function}
