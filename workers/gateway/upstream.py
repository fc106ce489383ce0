"""Carries out what the yard asks for: prefill and decode calls, aborts, pushes; reports what came of them."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import structlog

from apps.kvcache.domain.hashing import HASH_BYTES, extend_chain, tail_hash
from workers.gateway.errors import dropped
from workers.gateway.nodes import NodeCallError, NodeClient
from workers.gateway.session import Session
from workers.yard import commands, events
from workers.yard.config import ModelConfig

logger = structlog.get_logger("switchyard.gateway")
Feed = Callable[[events.Event], None]


class Upstream:
    """One per gateway. `sessions` and `nodes` are shared with the rest of the gateway; `feed` reports to the yard."""

    def __init__(
        self, model: ModelConfig, sessions: dict[str, Session], nodes: dict[str, NodeClient], feed: Feed
    ) -> None:
        self._model = model
        self._sessions = sessions
        self._nodes = nodes
        self._feed = feed
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends every call; the nodes free what they held as their connections close."""
        tasks = [*self._calls.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- commands -------------------------------------------------------------------------------------------------

    def start_prefill(self, command: commands.StartPrefill) -> None:
        session = self._sessions.get(command.request_id)
        node = self._nodes.get(command.node)
        if session is None:
            return
        route = session.route
        route.prefill_node, route.decode_node = command.node, command.decode_node or ""
        if command.attempt == 1:
            route.queue_s, route.predicted_ttft_s, route.reason = (
                command.queue_s,
                command.predicted_ttft_s,
                command.reason,
            )
        self._call(command.request_id, self._prefill(session, node, command))

    def start_decode(self, command: commands.StartDecode) -> None:
        session = self._sessions.get(command.request_id)
        if session is not None:
            session.route.decode_node = command.node
            self._call(command.request_id, self._decode(session, self._nodes.get(command.node), command))

    def abort(self, command: commands.AbortOnNode) -> None:
        """Closes our call, if it still runs, and tells the node, in case it does not see the closing."""
        call = self._calls.pop(command.request_id, None)
        if call is not None:
            call.cancel()
        node = self._nodes.get(command.node)
        if node is not None:
            self._spawn(node.abort(command.request_id))

    def drop_orphan(self, node: NodeClient, request_id: str) -> None:
        """Frees a request on a node where it has no business; its call to another node goes on."""
        self._spawn(node.abort(request_id))

    def refuse(self, command: commands.Refuse) -> None:
        session = self._sessions.get(command.request_id)
        if session is not None:
            session.fail(dropped(command.http_status, command.code, command.message, command.retry_after_s))

    def _call(self, request_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs a request's one current call; an older one of the same request is over by now."""
        task = asyncio.create_task(work)
        self._calls[request_id] = task

        def done(task: asyncio.Task[None]) -> None:
            if self._calls.get(request_id) is task:
                del self._calls[request_id]
            if not task.cancelled() and task.exception() is not None:
                logger.error("call failed", request=request_id, exc_info=task.exception())

        task.add_done_callback(done)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- prefill --------------------------------------------------------------------------------------------------

    async def _prefill(self, session: Session, node: NodeClient | None, command: commands.StartPrefill) -> None:
        try:
            if node is None:
                raise NodeCallError("unreachable", f"The node {command.node} is not known.", True)
            resumed = session.output_tokens
            answer = await node.prefill(self._prefill_body(session, command))
            result = prefill_result(answer)
        except NodeCallError as error:
            self._feed(events.PrefillFailed(session.request_id, error.retryable, error.reason, error.message))
            return
        except (KeyError, TypeError, ValueError) as error:
            text = f"The answer of the node {command.node} was not understood: {error}."
            self._feed(events.PrefillFailed(session.request_id, True, "bad-answer", text))
            return
        session.handoff, session.resumed_tokens = answer["handoff"], resumed
        if resumed == 0:
            session.route.cached_tokens = result.cached_tokens + result.fetched_tokens
        if result.first_finish != "stop" and session.accept(
            [int(answer["first_token_id"])], 1, _first_logprobs(answer)
        ):
            result = replace(result, first_finish="stop-string")
        if result.first_finish is not None:
            session.end(result.first_finish)
        self._feed(events.FirstToken(session.request_id))
        self._feed(events.PrefillFinished(session.request_id, result))

    def _prefill_body(self, session: Session, command: commands.StartPrefill) -> dict[str, Any]:
        ids = session.ids + session.output_ids
        chain, tail = self._hashes(session, ids)
        return {
            "request_id": session.request_id,
            "token_ids": ids.tolist(),
            "prompt_tokens": session.prompt.tokens + session.output_tokens,
            "chain_b64": b64encode(chain).decode(),
            "tail_hash_b64": None if tail is None else b64encode(tail).decode(),
            "fetch": self._fetch(command.fetch),
            "push": self._push(command),
            "sampling": self._sampling(session, session.output_tokens),
            "generation": command.generation,
        }

    def _hashes(self, session: Session, ids: array[int]) -> tuple[bytes, bytes | None]:
        """Chain and tail of a prompt and what was already answered to it; the prompt's own chain is not hashed again."""
        step = self._model.ids_per_block
        chain = session.prompt.chain
        done_ids = session.prompt.blocks * step
        parent = chain[-HASH_BYTES:] or session.prompt.root
        chain += extend_chain(parent, memoryview(ids)[done_ids:], step)
        tail_ids = memoryview(ids)[len(chain) // HASH_BYTES * step :]
        if not len(tail_ids):
            return chain, None
        return chain, tail_hash(chain[-HASH_BYTES:] or session.prompt.root, tail_ids)

    def _fetch(self, fetch: commands.Fetch | None) -> dict[str, Any] | None:
        source = self._nodes.get(fetch.source_node) if fetch is not None else None
        if fetch is None or source is None or not source.pool_name:
            return None
        return {
            "node": source.name,
            "url": source.url,
            "pool": source.pool_name,
            "from_block": fetch.from_block,
            "to_block": fetch.to_block,
        }

    def _push(self, command: commands.StartPrefill) -> dict[str, Any] | None:
        """The decode node, to which the context is sent while it is computed."""
        target = self._nodes.get(command.decode_node) if command.decode_node is not None else None
        if target is None or target.name == command.node or not target.pool_name:
            return None
        return {"node": target.name, "url": target.url, "pool": target.pool_name}

    @staticmethod
    def _sampling(session: Session, resumed_tokens: int) -> dict[str, Any]:
        """What is left to produce, counted from the prompt that the node gets: output up to there is part of it."""
        left = max(1, session.max_tokens - resumed_tokens)
        output_from = None if session.symbolic else len(session.ids)
        return {**session.body.sampling, "max_tokens": left, "output_from": output_from}

    # ---- decode ---------------------------------------------------------------------------------------------------

    async def _decode(self, session: Session, node: NodeClient | None, command: commands.StartDecode) -> None:
        try:
            if node is None:
                raise NodeCallError("unreachable", f"The node {command.node} is not known.", True)
            async with contextlib.aclosing(node.decode(self._decode_body(session, command))) as stream:
                async for event in stream:
                    if self._take(session, event):
                        return
        except NodeCallError as error:
            self._feed(events.DecodeFailed(session.request_id, error.retryable, error.reason, error.message))
        except (KeyError, TypeError, ValueError) as error:
            text = f"The stream of the node {command.node} was not understood: {error}."
            self._feed(events.DecodeFailed(session.request_id, True, "bad-answer", text))

    def _take(self, session: Session, event: dict[str, Any]) -> bool:
        """One decode event; True when nothing more of the stream is wanted."""
        if event["type"] == "tokens":
            count = int(event["n"])
            stopped = session.accept(event["ids"], count, event.get("logprobs"))
            self._feed(events.DecodeProgress(session.request_id, count))
            if stopped:
                self._feed(events.AnswerEnded(session.request_id, session.output_tokens))
            return stopped
        if event["type"] == "done":
            if event["finish_reason"] == "abort":
                raise NodeCallError("aborted", "The node aborted the request.", True)
            session.end(event["finish_reason"])
            chain = self._output_chain(session, b64decode(event.get("stored_chain_b64") or ""))
            finished = events.DecodeFinished(session.request_id, event["finish_reason"], session.output_tokens, chain)
            self._feed(finished)
        return False

    def _output_chain(self, session: Session, stored: bytes) -> bytes:
        """The answer's blocks after the prompt's: what the node stored after its own prompt, and before it the blocks of
        output that were part of that prompt. What is not the hash of prompt and output is left out."""
        if self._model.symbolic:
            return stored
        chain, _ = self._hashes(session, session.ids + session.output_ids)
        resumed_blocks = (session.prompt.tokens + session.resumed_tokens) // self._model.block_tokens
        own = resumed_blocks * HASH_BYTES
        if not chain.startswith(stored, own):
            logger.warning("a node says it stored other blocks than its output's", request=session.request_id)
            stored = b""
        return chain[len(session.prompt.chain) : own] + stored

    def _context_of(self, session: Session, source: str, ids: array[int]) -> dict[str, Any] | None:
        """Where the context of an output is: with its prefill node, or, moved away from a decode node, in the pool of that."""
        node = self._nodes.get(source)
        if session.handoff is None or session.handoff["node"] == source or node is None or not node.pool_name:
            return session.handoff
        chain, _ = self._hashes(session, ids[:-1])
        tokens = len(chain) // HASH_BYTES * self._model.block_tokens
        where = {"node": source, "url": node.url, "pool": node.pool_name, "chain_b64": b64encode(chain).decode()}
        return where | {"tail_hash_b64": None, "tail_tokens": 0, "context_tokens": tokens, "expires_at": 0.0}

    def _decode_body(self, session: Session, command: commands.StartDecode) -> dict[str, Any]:
        ids = session.ids if self._model.symbolic else session.ids + session.output_ids
        return {
            "request_id": session.request_id,
            "token_ids": ids.tolist(),
            "prompt_tokens": session.prompt.tokens + session.resumed_tokens,
            "generated": session.output_tokens - session.resumed_tokens,
            "handoff": self._context_of(session, command.source, ids),
            "sampling": self._sampling(session, session.resumed_tokens),
            "generation": command.generation,
            "root_b64": b64encode(session.prompt.root).decode(),
        }


def _first_logprobs(answer: dict[str, Any]) -> list[dict[str, Any]] | None:
    first = answer.get("first_logprob")
    return None if first is None else [first]


def prefill_result(answer: dict[str, Any]) -> events.PrefillResult:
    """A prefill answer in the yard's words. Raises KeyError, TypeError or ValueError when it is not one."""
    timings = answer["timings"]
    return events.PrefillResult(
        cached_tokens=int(answer["cached_tokens"]),
        fetched_tokens=int(answer["fetched_tokens"]),
        computed_tokens=int(answer["computed_tokens"]),
        failed_fetch_tokens=int(answer["failed_fetch_tokens"]),
        first_finish=answer["first_finish"],
        queued_s=float(timings["queued_s"]),
        fetch_s=float(timings["fetch_s"]),
        prefill_s=float(timings["prefill_s"]),
    )
