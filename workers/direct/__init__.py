"""Existing vLLM and SGLang servers, driven by their URL, without an agent beside them.

`bodies.py` puts our fields into a client's body without touching its others, `vllm.py` and `sglang.py` know each engine's
hand-over protocol, `loads.py` reads what an engine says of its load, `kv_events.py` decodes its KV events and
`kv_translation.py` puts them into our hashes, `kv_link.py` follows them over ZMQ, `node.py` is one server as the gateway
sees it. May import `workers.http`, `workers.yard` and the domains; nothing of Django.
"""
