"""Pure routing. May import `apps.kvcache.domain` and `apps.planning.domain`; time is an argument."""
