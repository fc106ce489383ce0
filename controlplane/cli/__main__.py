"""`python -m controlplane.cli`, which the script `switchyard` runs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from controlplane.cli.api_types import Api
from controlplane.cli.call import Call
from controlplane.cli.client import CliError, Http
from controlplane.cli.parser import parser


def main(arguments: Sequence[str] | None = None, transport: httpx.BaseTransport | None = None) -> int:
    """Exit status: 0 done, 1 done but not as hoped (a switch failed, a difference found), 2 not done."""
    args = parser().parse_args(arguments)
    try:
        http = Http(args.url, _key(args.key_file), transport)
        result = args.command(Call(Api(http), args, input if sys.stdin.isatty() else None, time.sleep))
    except CliError as error:
        if args.json:
            print(json.dumps(error.problem or {"detail": str(error)}))
        print(f"switchyard: {error}", file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    try:
        print(json.dumps(result.data, indent=1) if args.json else result.text, flush=True)
    except BrokenPipeError:
        # `switchyard ... | head` is no error; nobody reads the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(result.code)


def _key(file: str) -> str:
    if not file:
        return os.environ.get("SWITCHYARD_API_KEY", "")
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--key-file: {error}") from None


if __name__ == "__main__":
    raise SystemExit(main())
