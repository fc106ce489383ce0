"""Branches, KV blocks and what reuse they give. Pure: standard library and numpy, time is an argument.

    hashing     block hashes; a hasher that only hashes what is new in a branch
    events      what the machine is told (events) and what it asks for (commands)
    ledger      live branches: signals, leases, and inference where no signals come
    directory   who holds which run of blocks, and how many live branches count on it
    segments    the path-compressed tree under the directory
    inference   which branch a request without signals belongs to
    streams     a node's numbered events put in order
    reuse       ideal and actual reuse, and the cause of each lost token
    machine     KvMachine: the above composed
    eviction    HostIndex: a node's host-memory index and eviction order (used by pools and simulated engines)

Imported by routing, flow control and the workers; imports none of them.
"""
