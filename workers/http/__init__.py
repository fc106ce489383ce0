"""HTTP/1.1 for the request path: callbacks on asyncio transports, parsed by llhttp (`httptools`); no task per chunk.

`server.py` listens and reads requests, `exchange.py` is one request with its answer, `client.py` calls engines over kept
connections, `wire.py` holds what both sides write and check. Knows nothing of Switchyard; imports nothing of it.
"""
