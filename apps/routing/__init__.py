"""`domain/`: predicted TTFT, the choice of prefill and decode node, baseline policies."""
