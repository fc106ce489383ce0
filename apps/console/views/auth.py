"""Signing in, throttled, by password or with an OpenID Connect provider, and out."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import login
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_POST

from apps.console import throttle
from apps.console.formats import duration
from controlplane import env, oidc
from controlplane.errors import SwitchyardError


def _address(request: HttpRequest) -> str:
    return request.META.get("REMOTE_ADDR", "unknown")


class SignIn(LoginView):
    """The sign-in page; answers 429 with Retry-After when a name was tried too often."""

    template_name = "registration/login.html"
    redirect_authenticated_user = True

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(**kwargs) | {"provider": provider_name()}

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        wait_s = throttle.wait_s(_address(request), request.POST.get("username", ""))
        if wait_s:
            message = f"Too many wrong tries. You can try again in {duration(wait_s)}."
            form = AuthenticationForm(request, initial={"username": request.POST.get("username", "")})
            response = self.render_to_response(self.get_context_data(form=form, throttled=message), status=429)
            response["Retry-After"] = str(wait_s)
            return response
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: AuthenticationForm) -> HttpResponse:
        throttle.succeeded(_address(self.request), form.cleaned_data["username"])
        return super().form_valid(form)

    def form_invalid(self, form: AuthenticationForm) -> HttpResponse:
        throttle.failed(_address(self.request), form.data.get("username", ""))
        return self.render_to_response(self.get_context_data(form=form), status=422)


SESSION_KEY = "oidc"


def provider_name() -> str:
    """What the sign-in page calls the provider; empty when there is none."""
    return (env.text("SWITCHYARD_OIDC_NAME") or "single sign-on") if env.text("SWITCHYARD_OIDC_ISSUER") else ""


@require_POST
def oidc_begin(request: HttpRequest) -> HttpResponse:
    """Sends the browser to the provider."""
    try:
        known = oidc.settings()
        if known is None:
            return redirect("login")
        address, remembered = oidc.begin(known, _callback(request))
    except SwitchyardError as error:
        return _refused(request, error)
    request.session[SESSION_KEY] = remembered | {"next": request.POST.get("next", "")}
    return redirect(address)


@require_GET
def oidc_back(request: HttpRequest) -> HttpResponse:
    """Where the provider sends the browser back to."""
    remembered = request.session.pop(SESSION_KEY, {})
    try:
        known = oidc.settings()
        if known is None:
            return redirect("login")
        user = oidc.finish(known, _callback(request), request.GET.dict(), remembered)
    except SwitchyardError as error:
        return _refused(request, error)
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    wanted = remembered.get("next", "")
    safe = url_has_allowed_host_and_scheme(wanted, {request.get_host()}, require_https=request.is_secure())
    return redirect(wanted if wanted and safe else "home")


def _callback(request: HttpRequest) -> str:
    return request.build_absolute_uri(reverse("oidc-back"))


def _refused(request: HttpRequest, error: SwitchyardError) -> HttpResponse:
    context = {"form": AuthenticationForm(request), "provider": provider_name(), "refused": error.message}
    return render(request, "registration/login.html", context, status=error.status)
