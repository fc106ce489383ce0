"""Windows, proposals, approvals, switch orders; `domain/`: cost model, capacity, gate, guards, phase machine."""
