"""Engines behind one interface: `reference` (numpy Llama) and `simulated` (timing from coefficients)."""
