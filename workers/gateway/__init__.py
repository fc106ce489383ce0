"""The OpenAI-compatible front door: drives the yard in real time."""
