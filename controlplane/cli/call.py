"""What every command gets and gives: the API, its arguments, and a result that is both a table and JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from controlplane.cli.api_types import Api
from controlplane.cli.client import CliError, pages


@dataclass(frozen=True, slots=True)
class Result:
    """`data` is what `--json` prints, `text` what a person reads; `code` the exit status."""

    data: Any
    text: str
    code: int = 0


@dataclass
class Call:
    """One invocation."""

    api: Api
    args: argparse.Namespace
    ask: Callable[[str], str] | None = None
    wait: Callable[[float], None] = field(default=lambda _s: None)

    @cached_property
    def partition(self) -> str:
        """The one that was named, or the only one there is. Raises CliError when that is not clear."""
        if self.args.partition:
            return str(self.args.partition)
        names = [row["name"] for row in pages(self.api.list_partitions)]
        if len(names) != 1:
            raise CliError(f"say which partition with -p: {', '.join(names) or 'there is none'}")
        return str(names[0])

    @property
    def reason(self) -> str:
        return str(self.args.reason)

    def confirm(self, what: str, word: str) -> None:
        """A person types `word` before anything grave is done; a program says `--yes`."""
        if self.args.yes:
            return
        if self.ask is None:
            raise CliError(f"{what}: nobody is there to confirm it; say --yes")
        if self.ask(f"{what}. Type {word} to go on: ").strip() != word:
            raise CliError("not confirmed; nothing was done")


def read_documents(names: list[str]) -> str:
    """The YAML of several files, `-` for standard input, as one text."""
    texts = []
    for name in names:
        try:
            if name == "-":
                texts.append(sys.stdin.read())
            else:
                with open(name, encoding="utf-8") as file:
                    texts.append(file.read())
        except (OSError, UnicodeDecodeError) as error:
            raise CliError(f"{name}: {error}") from None
    return "\n---\n".join(texts)
