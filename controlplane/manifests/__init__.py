"""Configuration as YAML documents: llm-d's kinds for flow control, and our own for tenants, partitions, nodes and the
planner's policy. `kinds` says what each kind may hold, `applying` compares and applies, `api` is its REST."""
