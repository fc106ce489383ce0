"""Compiled modules are used where they are those of the sources and of this Python, and nowhere else."""

import json
import sys

import pytest

from apps import compiled


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A folder as `make compiled` leaves it, with one twin that is no more than a file."""
    monkeypatch.setattr(compiled, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delenv("SWITCHYARD_COMPILED", raising=False)
    (tmp_path / "twin.py").write_text("TWIN = True\n")
    (tmp_path / "manifest.json").write_text(
        json.dumps({"digest": compiled.digest(), "modules": {"a_hot_module": "twin.py"}})
    )
    yield tmp_path
    sys.modules.pop("a_hot_module", None)


def test_a_twin_is_imported_in_place_of_its_module(built):
    assert compiled.use() == "compiled"
    import a_hot_module

    assert a_hot_module.TWIN is True


def test_an_edited_source_is_run_as_it_is(built, monkeypatch):
    monkeypatch.setattr(compiled, "digest", lambda: "of other sources")
    assert compiled.use() == "interpreted: the sources changed since `make compiled`"
    with pytest.raises(ModuleNotFoundError):
        import a_hot_module  # noqa: F401


def test_the_digest_knows_each_source_and_the_python(monkeypatch, tmp_path):
    monkeypatch.setattr(compiled, "ROOT", tmp_path)
    monkeypatch.setattr(compiled, "HOT", ("hot", "one.py"))
    (tmp_path / "hot").mkdir()
    for name in ("hot/a.py", "hot/b.py", "hot/__init__.py", "one.py"):
        (tmp_path / name).write_text("x = 1\n")
    before = compiled.digest()
    (tmp_path / "hot/__init__.py").write_text("x = 2\n")
    assert compiled.digest() == before
    for name in ("hot/b.py", "one.py"):
        (tmp_path / name).write_text(f"x = '{name}'\n")
        assert compiled.digest() != before
        before = compiled.digest()
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert compiled.digest() != before


def test_it_is_turned_off_at_will(built, monkeypatch):
    monkeypatch.setenv("SWITCHYARD_COMPILED", "0")
    assert compiled.use() == "interpreted: SWITCHYARD_COMPILED=0"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"digest": 1}', "\x00"])
def test_a_damaged_folder_is_told_of_and_does_no_harm(built, text):
    (built / "manifest.json").write_text(text)
    finders = list(sys.meta_path)
    assert compiled.use().startswith("interpreted: ")
    assert sys.meta_path == finders


def test_without_a_folder_the_modules_run_as_they_are(built):
    (built / "manifest.json").unlink()
    assert compiled.use() == "interpreted: `make compiled` was not run"
