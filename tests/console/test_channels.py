"""Settings, channels: a new secret is shown once; a stale edit of what a channel is told shows the other person's."""

import re

import pytest

from apps.telemetry import webhooks
from apps.telemetry.models import Channel
from controlplane.actors import SYSTEM

SETTINGS = "/p/gb300/settings/"
EDIT, ROTATE = f"{SETTINGS}channels/pager/edit/", f"{SETTINGS}channels/pager/rotate/"


@pytest.fixture
def secret(partition, live):
    return webhooks.create_channel("pager", "http://127.0.0.1:9/", SYSTEM, kinds=["alert", "switch"]).secret


def test_a_new_secret_wants_the_channels_name_and_is_shown_once(as_role, secret):
    client = as_role("administrator")
    assert client.post(ROTATE, {"rotate-channel-confirm": "page"}).status_code == 422
    assert Channel.objects.get().secret == secret
    answer = client.post(ROTATE, {"rotate-channel-confirm": "pager", "rotate-channel-reason": "it leaked"})
    new = Channel.objects.get().secret
    assert new != secret and new in answer.content.decode()
    assert answer["Cache-Control"] == "no-store"
    assert new not in client.get(SETTINGS).content.decode()


def test_what_a_channel_is_told_is_edited_and_a_stale_edit_keeps_the_other_persons(as_role, secret):
    client = as_role("administrator")
    base = re.search(r'name="edit-channel-base" value="([^"]+)"', client.get(EDIT).content.decode())[1]
    webhooks.update_channel(Channel.objects.get(), SYSTEM, "too loud", kinds=["alert"])
    typed = {"edit-channel-url": "http://127.0.0.1:9/new", "edit-channel-kinds": ["alert", "switch"]}
    stale = client.post(EDIT, typed | {"edit-channel-base": base})
    assert stale.status_code == 409 and "too loud" in stale.content.decode()
    shown = stale.content.decode()
    assert re.search(r'value="alert"[^>]* checked', shown) and not re.search(r'value="switch"[^>]* checked', shown)
    assert Channel.objects.get().url == "http://127.0.0.1:9/"
    base = re.search(r'name="edit-channel-base" value="([^"]+)"', shown)[1]
    again = {"edit-channel-url": "http://127.0.0.1:9/new", "edit-channel-kinds": ["alert"], "edit-channel-base": base}
    assert client.post(EDIT, again).status_code == 200
    row = Channel.objects.get()
    assert (row.url, row.kinds) == ("http://127.0.0.1:9/new", ["alert"])
