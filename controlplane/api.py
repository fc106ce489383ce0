"""The REST API: one NinjaAPI that every app's router joins. Shared behaviour lives in `controlplane.rest`."""

from __future__ import annotations

from typing import Any

from ninja import NinjaAPI
from ninja.openapi.schema import OpenAPISchema

from apps.flowcontrol.api import router as flowcontrol_router
from apps.planning.api import router as planning_router
from apps.planning.experiments_api import router as experiments_router
from apps.telemetry.api import router as telemetry_router
from apps.telemetry.channels_api import router as channels_router
from apps.telemetry.rules_api import router as rules_router
from apps.telemetry.sums_api import router as sums_router
from apps.tenancy.api import router as tenancy_router
from apps.tenancy.members_api import router as members_router
from apps.topology.api import router as topology_router
from controlplane.manifests.api import router as manifests_router
from controlplane.rest import problems
from controlplane.rest.auth import AUTHENTICATORS
from controlplane.rest.bodies import BodyParser
from controlplane.rest.idempotency import idempotent

DESCRIPTION = """Everything the console does, for programs.

Send `Authorization: Bearer <key>` (a control-plane key), or a session with its CSRF token. Errors are problem details
(RFC 9457). Lists are paged by cursor. Edits honour `If-Match`, POSTs `Idempotency-Key`. Times are ISO 8601 except inside
live snapshots, which use unix seconds."""


class SwitchyardAPI(NinjaAPI):
    """Adds to the description what every operation shares."""

    def get_openapi_schema(self, **options: Any) -> OpenAPISchema:
        schema = super().get_openapi_schema(**options)
        schemas = schema["components"].setdefault("schemas", {})
        described = problems.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= described.pop("$defs", {})
        schemas["Problem"] = described
        for operations in schema["paths"].values():
            for method, operation in operations.items():
                _add_shared(method, operation, tagged="get" in operations)
        return schema

    def get_openapi_operation_id(self, operation: Any) -> str:
        return str(operation.view_func.__name__)


def _add_shared(method: str, operation: dict[str, Any], tagged: bool) -> None:
    """`tagged`: the same address can be read, and gives the ETag that an edit may name."""
    problem = {"schema": {"$ref": "#/components/schemas/Problem"}}
    answers = {str(status): answer for status, answer in operation["responses"].items()}
    operation["responses"] = answers | {
        "default": {"description": "Problem", "content": {problems.MEDIA_TYPE: problem}}
    }
    header = {"patch": "If-Match", "delete": "If-Match", "post": "Idempotency-Key"}.get(method)
    if header and (tagged or method == "post"):
        parameter = {"in": "header", "name": header, "required": False, "schema": {"type": "string"}}
        operation.setdefault("parameters", []).append(parameter)


api = SwitchyardAPI(
    title="Switchyard",
    version="1",
    description=DESCRIPTION,
    urls_namespace="rest",
    docs_url="/docs",
    auth=AUTHENTICATORS,
    parser=BodyParser(),
)
api.add_decorator(idempotent, mode="view")
problems.install(api)
api.add_router("", tenancy_router)
api.add_router("", members_router)
api.add_router("", topology_router)
api.add_router("", flowcontrol_router)
api.add_router("", telemetry_router)
api.add_router("", channels_router)
api.add_router("", rules_router)
api.add_router("", sums_router)
api.add_router("", planning_router)
api.add_router("", experiments_router)
api.add_router("", manifests_router)
