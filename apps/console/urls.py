"""Addresses of the console's pages."""

from __future__ import annotations

from django.contrib.auth.views import LogoutView
from django.urls import path

from apps.console.views import auth, nodes, overview, queues, shell, split

urlpatterns = [
    path("", shell.home, name="home"),
    path("login/", auth.SignIn.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    path("p/<str:partition>/", overview.overview, name="overview"),
    path("p/<str:partition>/queues/", queues.queues, name="queues"),
    path("p/<str:partition>/queues/bands/<str:name>/", queues.band, name="band"),
    path("p/<str:partition>/queues/tenants/<str:name>/", queues.tenant, name="tenant"),
    path("p/<str:partition>/split/", split.split, name="split"),
    path("p/<str:partition>/split/state/", split.state, name="split-state"),
    path("p/<str:partition>/split/proposals/<int:number>/approve/", split.approve, name="approve"),
    path("p/<str:partition>/split/proposals/<int:number>/reject/", split.reject, name="reject"),
    path("p/<str:partition>/split/force/", split.force, name="force"),
    path("p/<str:partition>/split/force/clear/", split.clear, name="clear-force"),
    path("p/<str:partition>/split/freeze/", split.freeze, name="freeze"),
    path("p/<str:partition>/split/unfreeze/", split.unfreeze, name="unfreeze"),
    path("p/<str:partition>/split/mode/", split.mode, name="mode"),
    path("p/<str:partition>/split/orders/<int:number>/roll-back/", split.roll_back, name="roll-back"),
    path("p/<str:partition>/nodes/", nodes.nodes, name="nodes"),
    path("p/<str:partition>/nodes/timeline/", nodes.timeline, name="timeline"),
    path("p/<str:partition>/nodes/<str:name>/force/", nodes.force, name="force-node"),
    path("p/<str:partition>/nodes/<str:name>/force/clear/", nodes.clear, name="clear-node-force"),
]
