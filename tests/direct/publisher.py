"""A double of an engine's KV event publisher and its replay service, over real ZMQ sockets."""

import asyncio

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Connects to a subscriber that binds, as vLLM does unless its endpoint has a wildcard. `tagged`: events are arrays that
    begin with their type's name, as before mid-2026. Blocks have numbers of the publisher's own as hashes."""

    def __init__(self, endpoint, replay, block_tokens, tagged=False):
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.connect(endpoint.replace("*", "127.0.0.1"))
        self.replay = self.context.socket(zmq.ROUTER)
        self.replay.bind(replay)
        self.block_tokens, self.tagged = block_tokens, tagged
        self.number, self.sent, self.asked = 0, {}, []
        self.task = asyncio.create_task(self._serve())

    def close(self):
        self.task.cancel()
        self.context.destroy(linger=0)

    async def stored(self, ids, first_hash=1000, **how):
        """The whole blocks of these tokens; answers their hashes."""
        count = len(ids) // self.block_tokens
        hashes = list(range(first_hash, first_hash + count))
        fields = {
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": list(ids[: count * self.block_tokens]),
            "block_size": self.block_tokens,
            "lora_id": None,
            "medium": "GPU",
        }
        await self.send("BlockStored", fields, **how)
        return hashes

    async def removed(self, hashes, **how):
        await self.send("BlockRemoved", {"block_hashes": list(hashes), "medium": "GPU"}, **how)

    async def cleared(self, **how):
        await self.send("AllBlocksCleared", {}, **how)

    async def send(self, kind, fields, lost=False):
        """`lost`: nobody hears of it but who asks for it again."""
        event = [kind, *fields.values()] if self.tagged else {"type": kind} | fields
        raw = msgspec.msgpack.encode([0.0, [event], 0])
        number, self.number = self.number, self.number + 1
        self.sent[number] = raw
        if not lost:
            await self.socket.send_multipart([b"kv@engine", number.to_bytes(8, "big"), raw])

    def restart(self):
        """Another process of the engine: it holds nothing and numbers from 0."""
        self.number, self.sent = 0, {}

    async def _serve(self):
        while True:
            client, _, first = await self.replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            for number, raw in self.sent.items():
                if number >= self.asked[-1]:
                    await self.replay.send_multipart([client, b"", number.to_bytes(8, "big"), raw])
            await self.replay.send_multipart([client, b"", END, b""])
