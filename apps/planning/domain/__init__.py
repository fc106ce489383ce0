"""Pure planning: cost model, capacity, gate, guards, phase machine. numpy and scipy only; time is an argument."""
