"""`make compiled`: the hot modules as C extensions, by mypyc. Needs a C compiler; takes some three minutes.

The twins lie in `build/compiled` and are used as long as the sources are what they were (`apps/compiled.py`).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from apps.compiled import FOLDER, ROOT, digest, sources, use
from tools.constructors import write_out

SETUP = """
import json, sys
from setuptools import setup
from mypyc.build import mypycify
modules = json.loads(sys.argv.pop())
setup(name="twins", packages=[], ext_modules=mypycify(["--config-file=mypy.ini", *modules], opt_level="3", debug_level="0"))
"""
MYPY = """
[mypy]
ignore_missing_imports = True
follow_imports = silent
explicit_package_bases = True
disallow_untyped_defs = True
"""
COPIED = ("apps", "controlplane", "workers")


def build(work: Path) -> Path:
    """Compiles in `work`; answers the folder with the twins. Raises CalledProcessError."""
    for name in COPIED:
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sources():
        (work / path).write_text(write_out((ROOT / path).read_text()))
    (work / "setup.py").write_text(SETUP)
    (work / "mypy.ini").write_text(MYPY)
    made = work / "made"
    wanted = json.dumps([str(path) for path in sources()])
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(made), "--build-temp", "temp", wanted]
    subprocess.run(command, cwd=work, check=True)
    return made


def main() -> int:
    if "--if-needed" in sys.argv and use() == "compiled":
        return 0
    began = time.monotonic()
    before = digest()
    print(f"compiling {len(sources())} modules", flush=True)
    with tempfile.TemporaryDirectory(prefix="switchyard-compile-") as folder:
        try:
            made = build(Path(folder))
        except subprocess.CalledProcessError:
            print(
                "not compiled: nothing is changed, the modules run as they are (is there a C compiler?)",
                file=sys.stderr,
            )
            return 1
        if digest() != before:
            print("not compiled: the sources changed meanwhile", file=sys.stderr)
            return 1
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        found = [path.relative_to(made) for path in made.rglob(f"*{suffix}")]
        modules = {str(path).removesuffix(suffix).replace("/", "."): str(path) for path in found}
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(made, FOLDER)
    (FOLDER / "manifest.json").write_text(json.dumps({"digest": before, "modules": modules}, indent=1))
    print(f"{len(modules)} modules in {FOLDER.relative_to(ROOT)} after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
