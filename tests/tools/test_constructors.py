"""Constructors written out for compiling: the same objects, and the same lines in tracebacks."""

import dataclasses

import pytest

from apps.compiled import ROOT, sources
from tools.constructors import write_out

SOURCE = '''
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Frozen:
    """A name and what belongs to it."""

    name: str
    size: int = 3
    tags: dict[str, int] = field(default_factory=dict)
    note: str | None = field(default=None, compare=False)

    def double(self) -> int:
        return 2 * self.size


@dataclass(slots=True)
class Checked:
    low: int
    twice: int = field(init=False)
    high: int = 9

    def __post_init__(self) -> None:
        if self.low < 0:
            raise ValueError("low")
        self.twice = 2 * self.low
'''


def made(source):
    space = {"__name__": "made"}
    exec(compile(source, "made", "exec", flags=0, dont_inherit=True), space)
    return space


def test_what_is_written_out_makes_the_same_objects():
    # A frozen object can be filled by its own constructor only where it is compiled.
    plain, written = made(SOURCE), made(write_out(SOURCE).replace("frozen=True, ", ""))
    for arguments in ({"name": "a"}, {"name": "a", "size": 5, "tags": {"x": 1}, "note": "n"}):
        one, other = plain["Frozen"](**arguments), written["Frozen"](**arguments)
        assert dataclasses.asdict(one) == dataclasses.asdict(other)
        assert repr(one) == repr(other)
    assert written["Frozen"]("a").tags is not written["Frozen"]("a").tags
    assert written["Frozen"]("a", note="x") == written["Frozen"]("a")
    with pytest.raises(ValueError, match="low"):
        written["Checked"](-1)
    assert repr(plain["Checked"](4, 5)) == repr(written["Checked"](4, 5))


def test_lines_stay_where_they_are():
    written = write_out(SOURCE)
    assert written.count("dataclass(init=False, ") == 2
    assert [line for line in written.split("\n") if "def double" in line or "raise" in line] == [
        line for line in SOURCE.split("\n") if "def double" in line or "raise" in line
    ]
    assert written.split("\n").index("class Checked:") == SOURCE.split("\n").index("class Checked:")


@pytest.mark.parametrize(
    "source",
    [
        "@dataclass(slots=True)\nclass Child(Parent):\n    a: int\n\n\n",
        "@dataclass(slots=True)\nclass Own:\n    a: int\n\n    def __init__(self):\n        self.a = 1\n",
        "@dataclass(slots=True)\nclass Shared:\n    a: ClassVar[int] = 1\n\n\n",
        "@dataclass(slots=True)\nclass Full:\n    a: int\n    def b(self): ...\n",
        "@dataclass(slots=True)\nclass Made:\n    a: int = field(init=False, default=2)\n    b: int = 1\n\n\n",
        "@dataclass(slots=True, kw_only=True)\nclass Named:\n    a: int = 1\n    b: int\n\n\n",
        "class Plain:\n    a: int\n\n\n",
    ],
)
def test_other_classes_are_left_as_they_are(source):
    assert write_out(source) == source


@pytest.mark.parametrize("path", sources(), ids=str)
def test_every_hot_module_keeps_its_lines(path):
    source = (ROOT / path).read_text()
    written = write_out(source)
    compile(written, str(path), "exec")
    assert written.count("\n") == source.count("\n")
