"""The reference engine: a real Llama-architecture model in numpy, one loop for prefill and decode.

`gguf_file` metadata; `weights` float32 file shared by all nodes; `tokenizer` text <-> ids (the gateway uses it too);
`model` the forward pass; `kv` paged device KV; `sampler` token choice; `tasks` and `scheduler` what runs next; `loop` the
engine's thread; `fetcher` blocks from peers while queued; `engine` the interface of `engines/base.py`.
"""
