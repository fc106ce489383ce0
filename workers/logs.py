"""Logging of the processes that serve HTTP: one line an entry, and nothing of a caller's headers or body in it.

Tracebacks carry no local variables, which may hold API keys, prompts or the agent token.
"""

from __future__ import annotations

import logging
import sys

import structlog
from aiohttp.http_exceptions import HttpProcessingError


class BadHttpIsNoFault(logging.Filter):
    """Turns aiohttp's traceback about bytes that are not HTTP, which quotes them, into one line without them."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            caller = record.args[0] if isinstance(record.args, tuple) and record.args else "a client"
            record.msg, record.args = "%s sent bad HTTP: %s", (caller, type(error).__name__)
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
        return True


def configure_logging() -> None:
    """Effects: structlog and the standard library's logging of this process write to stderr."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    server = logging.getLogger("aiohttp.server")
    if not any(isinstance(known, BadHttpIsNoFault) for known in server.filters):
        server.addFilter(BadHttpIsNoFault())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
