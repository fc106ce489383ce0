"""The node agent: phase, events, KV pool, transfers, HTTP API; engines live in `engines/`."""
