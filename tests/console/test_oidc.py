"""Signing in with a provider: who gets in with which role, and every forged or foreign answer that does not."""

import base64
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.auth.models import User


@pytest.fixture
def provider(monkeypatch):
    """A provider on this machine; `claims` is what its next ID token says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(server.document)

        def do_POST(self):
            server.form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            body = base64.urlsafe_b64encode(json.dumps(server.claims).encode()).rstrip(b"=").decode()
            self.answer({"id_token": f"e30.{body}.sig"})

        def answer(self, document):
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    base = f"http://127.0.0.1:{server.server_port}"
    server.document = {"issuer": base, "authorization_endpoint": f"{base}/auth", "token_endpoint": f"{base}/token"}
    server.claims = {
        "iss": base,
        "aud": "yard",
        "sub": "ada-1",
        "exp": time.time() + 300,
        "name": "Ada",
        "groups": ["ops"],
    }
    for name, value in (
        ("ISSUER", base),
        ("CLIENT_ID", "yard"),
        ("CLIENT_SECRET", "s"),
        ("ROLES", "ops=operator,admins=administrator"),
    ):
        monkeypatch.setenv(f"SWITCHYARD_OIDC_{name}", value)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def sign_in(client, provider, state=None, nonce=None, **more):
    sent = client.post("/login/oidc/", {"next": "/p/gb300/queues/"})
    query = parse_qs(urlsplit(sent.url).query)
    provider.claims["nonce"] = query["nonce"][0] if nonce is None else nonce
    return client.get(
        "/login/oidc/back/", {"code": "c", "state": query["state"][0] if state is None else state, **more}
    )


def test_groups_of_the_provider_become_roles(client, db, provider):
    answer = sign_in(client, provider)
    assert answer.status_code == 302 and answer.url == "/p/gb300/queues/"
    user = User.objects.get()
    assert (user.first_name, [g.name for g in user.groups.all()]) == ("Ada", ["operator"])
    assert not user.has_usable_password()
    assert "code_verifier" in provider.form and provider.form["client_secret"] == ["s"]
    provider.claims["groups"] = ["admins"]
    client.post("/logout/")
    sign_in(client, provider)
    assert [g.name for g in User.objects.get().groups.all()] == ["administrator"], "brought up to date"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iss": "http://evil"}, "another provider"),
        ({"aud": "other"}, "another application"),
        ({"exp": 1}, "expired"),
        ({"sub": ""}, "names nobody"),
        ({"groups": ["guests"]}, "none of your groups"),
        ({"groups": "ops"}, "none of your groups"),
    ],
)
def test_a_token_that_is_not_for_us_lets_nobody_in(client, db, provider, changes, said):
    provider.claims |= changes
    answer = sign_in(client, provider)
    assert answer.status_code == 403 and said in answer.content.decode().lower()
    assert not User.objects.exists() and "_auth_user_id" not in client.session


@pytest.mark.parametrize("forged", [{"state": "made-up"}, {"nonce": "made-up"}, {"error": "access_denied"}])
def test_an_answer_to_another_sign_in_is_refused(client, db, provider, forged):
    answer = sign_in(client, provider, **forged)
    assert answer.status_code == 403 and not User.objects.exists()


def test_an_answer_is_used_once(client, db, provider):
    first = sign_in(client, provider)
    again = client.get("/login/oidc/back/", {"code": "c", "state": "s"})
    assert (first.status_code, again.status_code) == (302, 403)


def test_a_closed_account_stays_closed(client, db, provider):
    sign_in(client, provider)
    User.objects.update(is_active=False)
    client.post("/logout/")
    assert sign_in(client, provider).status_code == 403


def test_nobody_is_sent_to_another_site_afterwards(client, db, provider):
    sent = client.post("/login/oidc/", {"next": "https://evil.example/"})
    query = parse_qs(urlsplit(sent.url).query)
    provider.claims["nonce"] = query["nonce"][0]
    assert client.get("/login/oidc/back/", {"code": "c", "state": query["state"][0]}).url == "/"


def test_a_provider_without_https_is_refused(client, db, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_OIDC_ISSUER", "http://login.example")
    monkeypatch.setenv("SWITCHYARD_OIDC_CLIENT_ID", "yard")
    answer = client.post("/login/oidc/")
    assert answer.status_code == 403 and b"https" in answer.content


def test_without_a_provider_the_page_offers_none(client, db):
    assert b"single sign-on" not in client.get("/login/").content
    assert client.post("/login/oidc/").url == "/login/"
