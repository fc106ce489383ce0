"""Addresses of the console's pages."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path

from apps.console.views import auth, overview, queues, shell

urlpatterns = [
    path("", shell.home, name="home"),
    path("login/", auth.SignIn.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("p/<str:partition>/", overview.overview, name="overview"),
    path("p/<str:partition>/queues/", queues.queues, name="queues"),
    path("p/<str:partition>/queues/bands/<str:name>/", queues.band, name="band"),
    path("p/<str:partition>/queues/tenants/<str:name>/", queues.tenant, name="tenant"),
    path("p/<str:partition>/split/", overview.overview, name="split"),
    path("p/<str:partition>/nodes/", overview.overview, name="nodes"),
    path("p/<str:partition>/audit/", overview.overview, name="audit"),
]
