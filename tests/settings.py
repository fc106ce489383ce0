"""The product's settings over a throw-away data folder and embedded servers of its own (started on first need, see conftest)."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_folder = Path(tempfile.mkdtemp(prefix="switchyard-test-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
os.environ["SWITCHYARD_DATA"] = str(_folder)
os.environ["SWITCHYARD_SECRET_KEY"] = "tests-only-secret-key-tests-only-secret-key-tests-only"
os.environ["SWITCHYARD_AGENT_TOKEN"] = "tests-only-agent-token"

from controlplane.embedded import EmbeddedServices

services = EmbeddedServices(_folder, password="tests-only", durable=False)
os.environ.update(services.urls())

from controlplane.settings import *

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
