"""Signing in with an OpenID Connect provider: authorization code with PKCE, state and nonce.

Configured from the environment: `SWITCHYARD_OIDC_ISSUER`, `SWITCHYARD_OIDC_CLIENT_ID`, `SWITCHYARD_OIDC_CLIENT_SECRET`,
`SWITCHYARD_OIDC_GROUPS_CLAIM` (default `groups`) and `SWITCHYARD_OIDC_ROLES`, pairs such as
`yard-admins=administrator,yard-ops=operator`. Someone whose groups give no role cannot sign in.

The ID token comes straight from the provider's token endpoint over TLS, which OpenID Connect Core 3.1.3.7 accepts in place
of checking its signature; issuer, audience, expiry and nonce are checked. A provider without https is refused unless it is
on this machine.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx
from django.contrib.auth.models import Group, User
from django.db import transaction

from controlplane import env
from controlplane.errors import SwitchyardError, Unavailable
from controlplane.permissions import Role

TIMEOUT_S = 10.0
CLOCK_SKEW_S = 60.0
_LOCAL = ("127.0.0.1", "localhost", "::1")


class SignInRefused(SwitchyardError):
    """The provider or its answer does not let this person in; the message says why."""

    status = 403
    title = "Sign-in refused"


@dataclass(frozen=True, slots=True)
class Settings:
    issuer: str
    client_id: str
    client_secret: str
    groups_claim: str
    roles: dict[str, str]


def settings() -> Settings | None:
    """None when no provider is configured. Raises SignInRefused for settings that cannot work."""
    issuer = env.text("SWITCHYARD_OIDC_ISSUER").rstrip("/")
    if not issuer:
        return None
    _check_address("SWITCHYARD_OIDC_ISSUER", issuer)
    client_id = env.text("SWITCHYARD_OIDC_CLIENT_ID")
    if not client_id:
        raise SignInRefused("SWITCHYARD_OIDC_CLIENT_ID: expected the client's id at the provider", "oidc-misconfigured")
    return Settings(
        issuer,
        client_id,
        env.text("SWITCHYARD_OIDC_CLIENT_SECRET"),
        env.text("SWITCHYARD_OIDC_GROUPS_CLAIM") or "groups",
        _roles(env.text("SWITCHYARD_OIDC_ROLES")),
    )


def _roles(text: str) -> dict[str, str]:
    pairs = dict(part.strip().partition("=")[::2] for part in text.split(",") if part.strip())
    for group, role in pairs.items():
        if role not in Role.values:
            raise SignInRefused(
                f"SWITCHYARD_OIDC_ROLES: {group}={role}: expected one of {', '.join(Role.values)}", "oidc-misconfigured"
            )
    return pairs


def _check_address(name: str, url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in _LOCAL:
        raise SignInRefused(f"{name}: expected an https address", "oidc-misconfigured")


def begin(known: Settings, callback: str) -> tuple[str, dict[str, str]]:
    """Where to send the browser, and what its session must remember until it comes back."""
    remembered = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "verifier")}
    digest = hashlib.sha256(remembered["verifier"].encode()).digest()
    query = {
        "response_type": "code",
        "scope": "openid profile email",
        "client_id": known.client_id,
        "redirect_uri": callback,
        "state": remembered["state"],
        "nonce": remembered["nonce"],
        "code_challenge": base64.urlsafe_b64encode(digest).rstrip(b"=").decode(),
        "code_challenge_method": "S256",
    }
    endpoint = _discovered(known)["authorization_endpoint"]
    return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}", remembered


def finish(known: Settings, callback: str, answer: dict[str, str], remembered: dict[str, str]) -> User:
    """The user behind the provider's answer, made or brought up to date. Raises SignInRefused or Unavailable."""
    if not remembered or not secrets.compare_digest(answer.get("state", ""), remembered.get("state", "")):
        raise SignInRefused("this sign-in was not begun here, or it took too long; try again", "oidc-state")
    if answer.get("error") or not answer.get("code"):
        raise SignInRefused(f"the provider refused: {answer.get('error', 'no code')[:80]}", "oidc-refused")
    claims = _claims(known, callback, answer["code"], remembered["verifier"])
    if not secrets.compare_digest(str(claims.get("nonce", "")), remembered["nonce"]):
        raise SignInRefused("the provider's answer belongs to another sign-in", "oidc-nonce")
    return _user(known, claims)


def _discovered(known: Settings) -> dict[str, Any]:
    found = _json("GET", f"{known.issuer}/.well-known/openid-configuration")
    if str(found.get("issuer", "")).rstrip("/") != known.issuer:
        raise SignInRefused("the provider calls itself by another name than SWITCHYARD_OIDC_ISSUER", "oidc-issuer")
    for name in ("authorization_endpoint", "token_endpoint"):
        _check_address(name, str(found.get(name, "")))
    return found


def _claims(known: Settings, callback: str, code: str, verifier: str) -> dict[str, Any]:
    form = {
        "grant_type": "authorization_code", "code": code, "redirect_uri": callback, "client_id": known.client_id,
        "code_verifier": verifier,
    }  # fmt: skip
    if known.client_secret:
        form["client_secret"] = known.client_secret
    token = str(_json("POST", _discovered(known)["token_endpoint"], form).get("id_token", ""))
    try:
        body = token.split(".")[1]
        claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    except (IndexError, ValueError):
        raise SignInRefused("the provider sent no ID token", "oidc-token") from None
    audience = claims.get("aud")
    if str(claims.get("iss", "")).rstrip("/") != known.issuer:
        raise SignInRefused("the ID token comes from another provider", "oidc-token")
    if known.client_id not in (audience if isinstance(audience, list) else [audience]):
        raise SignInRefused("the ID token is meant for another application", "oidc-token")
    expires = claims.get("exp")
    if not isinstance(expires, int | float) or expires < time.time() - CLOCK_SKEW_S:
        raise SignInRefused("the ID token has expired", "oidc-token")
    if not claims.get("sub"):
        raise SignInRefused("the ID token names nobody", "oidc-token")
    return claims


def _json(method: str, url: str, form: dict[str, str] | None = None) -> dict[str, Any]:
    try:
        answer = httpx.request(method, url, data=form, timeout=TIMEOUT_S, headers={"Accept": "application/json"})
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise Unavailable("the sign-in provider does not answer", "oidc-away") from error
    if answer.status_code != 200 or not isinstance(found, dict):
        raise SignInRefused(f"the provider answered {answer.status_code}", "oidc-refused")
    return found


def _user(known: Settings, claims: dict[str, Any]) -> User:
    groups = claims.get(known.groups_claim) or []
    roles = {known.roles[g] for g in groups if g in known.roles} if isinstance(groups, list) else set()
    if not roles:
        raise SignInRefused("none of your groups has a role here; ask an administrator", "oidc-no-role")
    shown = str(claims.get("name") or claims.get("preferred_username") or claims.get("email") or "")
    # The subject is what a provider never gives to somebody else; names may be. "#" is in no name of a local account.
    mark = "#" + hashlib.sha256(f"{known.issuer} {claims['sub']}".encode()).hexdigest()[:16]
    called = re.sub(r"[^\w@.+-]", "", str(claims.get("preferred_username") or claims.get("email") or "user"))[:100]
    with transaction.atomic():
        user = User.objects.filter(username__endswith=mark).first()
        made = user is None
        user = user or User(username=f"{called}{mark}")
        if not user.is_active:
            raise SignInRefused("your account here is closed", "oidc-closed")
        if made:
            user.set_unusable_password()
        user.first_name, user.email = shown[:150], str(claims.get("email") or "")[:254]
        user.save()
        user.groups.set([Group.objects.get_or_create(name=role)[0] for role in sorted(roles)])
    return user
