"""Find Chromium for the browser tests, or bring it from Debian's packages: `python -m tools.browser` prints its path.

As root it is installed with apt-get. As a normal user the missing packages are downloaded with a private apt state and
unpacked under `.cache/browser`, which needs no rights and changes nothing outside the checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRIVATE = ROOT / ".cache" / "browser"
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def find() -> Path | None:
    """The browser to use, or None: SWITCHYARD_CHROMIUM, then the system's, then the private copy."""
    given = os.environ.get("SWITCHYARD_CHROMIUM")
    if given:
        return Path(given)
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return Path(found)
    wrapper = PRIVATE / "chromium"
    return wrapper if wrapper.exists() else None


def _apt(*arguments: str) -> None:
    subprocess.run(
        ["apt-get", "-q", *arguments],
        check=True,
        stdout=sys.stderr,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )


def _install_as_root() -> None:
    _apt("update")
    _apt("install", "-y", "--no-install-recommends", "chromium")


def _unpack_as_user() -> None:
    state, cache, tree = PRIVATE / "apt" / "state", PRIVATE / "apt" / "cache", PRIVATE / "tree"
    for folder in (state / "lists" / "partial", cache / "archives" / "partial", tree):
        folder.mkdir(parents=True, exist_ok=True)
    options = [
        "-o", f"Dir::State={state}", "-o", "Dir::State::status=/var/lib/dpkg/status", "-o", f"Dir::Cache={cache}",
        "-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User=",
    ]  # fmt: skip
    _apt(*options, "update")
    _apt(*options, "install", "-y", "--download-only", "--no-install-recommends", "chromium")
    for package in sorted((cache / "archives").glob("*.deb")):
        subprocess.run(["dpkg-deb", "-x", str(package), str(tree)], check=True)
        package.unlink()
    libraries = ":".join(str(folder) for folder in sorted((tree / "usr" / "lib").glob("*-linux-gnu*")))
    wrapper = PRIVATE / "chromium"
    wrapper.write_text(
        "#!/bin/sh\n"
        f'export LD_LIBRARY_PATH="{libraries}:{tree}/usr/lib/chromium${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"\n'
        f'[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_PATH="{tree}/etc/fonts" XDG_DATA_HOME="{tree}/usr/share"\n'
        f'exec "{tree}/usr/lib/chromium/chromium" "$@"\n'
    )
    wrapper.chmod(0o755)


def ensure(private: bool = False) -> Path:
    """Find or bring the browser. Raises SystemExit with what to do when it can't be brought."""
    found = None if private else find()
    if found:
        return found
    if not shutil.which("apt-get"):
        raise SystemExit(
            "no Chromium found and no apt-get here: install Chromium and set SWITCHYARD_CHROMIUM to its path"
        )
    try:
        if os.geteuid() == 0 and not private:
            _install_as_root()
        else:
            _unpack_as_user()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"Chromium could not be brought ({error}); install it and set SWITCHYARD_CHROMIUM") from error
    path = PRIVATE / "chromium" if private else find()
    if not path:
        raise SystemExit("Chromium was installed but not found; set SWITCHYARD_CHROMIUM to its path")
    return path


if __name__ == "__main__":
    print(ensure(private="--private" in sys.argv[1:]))
