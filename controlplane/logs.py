"""What the log is spared."""

from __future__ import annotations

import logging

from django.core.exceptions import PermissionDenied

from controlplane.errors import database_trouble


class Brief(logging.Filter):
    """What is refused, and what fails because PostgreSQL is away, is told in one line, without a traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, PermissionDenied):
            record.exc_info = None
        elif trouble := database_trouble(error):
            record.exc_info = None
            record.msg, record.args = "%s (%s)", (record.getMessage(), trouble.code)
        return True
