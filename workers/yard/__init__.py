"""One partition's machines composed (ledger, directory, router, flow control, model); no I/O. Gateway and simulator drive it."""
