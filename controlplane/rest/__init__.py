"""What every REST router shares: authentication, problem details, ETags, idempotency, paging. Routers live in the apps."""
