"""Branches and KV blocks; `domain/`: block hashes, branch ledger, directory, eviction, reuse accounting."""
