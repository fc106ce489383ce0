"""The site's addresses: console at /, REST under /api/v1, Django's admin under /admin."""

from django.contrib import admin
from django.urls import include, path

from controlplane.api import api
from controlplane.health import healthz
from controlplane.metrics import metrics

urlpatterns = [
    path("healthz", healthz, name="healthz"),
    path("metrics", metrics, name="metrics"),
    path("api/v1/", api.urls),
    path("admin/", admin.site.urls),
    path("", include("apps.console.urls")),
]

handler500 = "controlplane.failures.failed"
