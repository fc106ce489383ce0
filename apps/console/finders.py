"""Serves browser files that arrive inside Python wheels, so that the console needs neither a Node toolchain nor a CDN."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from django.contrib.staticfiles.finders import BaseFinder
from django.core.files.storage import FileSystemStorage


def _package_folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the console needs the package {package!r} for its browser files")
    return Path(next(iter(spec.submodule_search_locations)))


class WheelFinder(BaseFinder):
    """Finds `plotly/plotly.min.js` in the plotly wheel, and nothing else of that wheel's ten megabytes."""

    prefix = "plotly"
    names = ("plotly.min.js",)

    def __init__(self, app_names: Any = None, *args: Any, **kwargs: Any) -> None:
        self.storage = FileSystemStorage(location=str(_package_folder("plotly") / "package_data"))
        self.storage.prefix = self.prefix  # type: ignore[attr-defined]
        super().__init__(*args, **kwargs)

    def check(self, **kwargs: Any) -> list[Any]:
        return []

    def find(self, path: str, find_all: bool = False, **kwargs: Any) -> Any:
        folder, _, name = path.replace("\\", "/").partition("/")
        if folder != self.prefix or name not in self.names:
            return []
        found = self.storage.path(name)
        return [found] if find_all or kwargs.get("all") else found

    def list(self, ignore_patterns: Any) -> Iterator[tuple[str, FileSystemStorage]]:
        for name in self.names:
            yield name, self.storage
