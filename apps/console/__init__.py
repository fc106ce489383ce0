"""Pages, websocket consumers, charts. Reads selectors, calls services, holds no rules of its own."""
