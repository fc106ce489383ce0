"""Signing in, throttled, and out."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse

from apps.console import throttle
from apps.console.formats import duration


def _address(request: HttpRequest) -> str:
    return request.META.get("REMOTE_ADDR", "unknown")


class SignIn(LoginView):
    """The sign-in page; answers 429 with Retry-After when a name was tried too often."""

    template_name = "registration/login.html"
    redirect_authenticated_user = True

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
