"""A server of one scripted chat answer, spoken in another API by the translators; the real clients talk to it in memory."""

import json
from dataclasses import dataclass, field

import anthropic
import httpx
import httpx2
import openai

from workers.gateway.dialects import messages_answer, messages_request, responses_request
from workers.gateway.dialects.messages_answer import MessageAnswer
from workers.gateway.dialects.responses_answer import ResponseAnswer
from workers.gateway.errors import ApiError

USAGE = {"prompt_tokens": 50, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32}}


def delta(**content):
    return {"choices": [{"index": 0, "delta": content, "finish_reason": None}]}


def finish(reason, **told):
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason, **told}]}


def call(index, **function):
    call_id = {"id": function.pop("id")} if "id" in function else {}
    return delta(tool_calls=[{"index": index, **call_id, "type": "function", "function": function}])


TEXT = [
    delta(role="assistant", content=""),
    delta(content="Hel"),
    delta(content="lo é"),
    finish("stop"),
    {"choices": [], "usage": USAGE},
]
TOOLS = [
    delta(content="I look."),
    call(0, id="call_1", name="weather", arguments=""),
    call(0, arguments='{"city":'),
    call(0, arguments=' "Rome"}'),
    call(1, id="call_2", name="time", arguments="{}"),
    finish("tool_calls"),
    {"choices": [], "usage": USAGE},
]


@dataclass
class Scripted:
    chunks: list
    chat_bodies: list = field(default_factory=list)

    def answer(self, request):
        """Status, content type and body."""
        body = json.loads(request.content)
        messages = request.url.path.endswith("/messages")
        try:
            reader = messages_request if messages else responses_request
            self.chat_bodies.append(reader.chat_body(body))
        except ApiError as error:
            told = messages_answer.error_body(error, "r1") if messages else json.dumps(error.body()).encode()
            return error.status, "application/json", told
        answer = MessageAnswer("r1", "m") if messages else ResponseAnswer("r1", "m", 1.0, body)
        if not body.get("stream"):
            for chunk in self.chunks:
                answer.push(chunk)
            return 200, "application/json", answer.whole()
        stream = answer.head() + b"".join(answer.push(chunk) for chunk in self.chunks) + answer.end()
        return 200, "text/event-stream", stream

    def serve(self, module):
        def handle(request):
            status, kind, body = self.answer(request)
            return module.Response(status, content=body, headers={"content-type": kind})

        return module.Client(transport=module.MockTransport(handle))

    @property
    def anthropic(self) -> anthropic.Anthropic:
        http = self.serve(httpx2)  # that client has an httpx of its own
        return anthropic.Anthropic(api_key="k", base_url="http://x", http_client=http, max_retries=0)

    @property
    def openai(self) -> openai.OpenAI:
        http = self.serve(httpx)
        return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=http, max_retries=0)
