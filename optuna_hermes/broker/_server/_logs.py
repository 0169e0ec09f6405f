"""Logs of a broker, for people and for programs."""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import time
from io import TextIOWrapper
from pathlib import Path

from optuna_hermes.ledger._records import EventRecord

FIELDS = ("study", "trial", "device", "epoch")
"""Fields of a record beside its message, given as ``extra``."""

FILE_BYTES = 5_000_000
OLD_FILES = 3
"""A log in a file is this long at most, and has so many older ones beside it."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``message``, and known ``FIELDS``.

    A traceback is in ``error``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        document = {
            "time": _utc(record.created),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        found = {name: getattr(record, name, None) for name in FIELDS}
        document.update({name: value for name, value in found.items() if value is not None})
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


class TextFormatter(logging.Formatter):
    """Formatter for people: known ``FIELDS`` come last."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """See ``logging.Formatter``."""
        found = {name: getattr(record, name, None) for name in FIELDS}
        known = [f"{name} {value}" for name, value in found.items() if value is not None]
        return super().formatMessage(record) + (f" ({', '.join(known)})" if known else "")


def start_logging(*, file: Path | None = None, as_json: bool = False) -> None:
    """Log to standard error, or to a file that never grows without bound.

    Older files are beside it as ``NAME.1`` and so on; ``as_json`` for one JSON object a line.
    """
    logging.basicConfig(level=logging.INFO, handlers=[log_handler(file, as_json=as_json)])


def log_handler(file: Path | None, *, as_json: bool) -> logging.Handler:
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler()
    else:
        handler = _PrivateFile(file, maxBytes=FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8")
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    return handler


def log_event(event: EventRecord, study: str) -> None:
    """Log an event that goes into the ledger, with its study's name."""
    known = {name: event.detail[name] for name in FIELDS if name in event.detail}
    rest = ", ".join(f"{k} {v}" for k, v in event.detail.items() if k not in known)
    text = f"{event.kind}: {rest}" if rest else event.kind
    extra = {**known, "study": study, "trial": event.number}
    logging.getLogger("optuna_hermes.broker").info("%s", text, extra=extra)


class _PrivateFile(logging.handlers.RotatingFileHandler):
    """Log files that only their user can read, also after their folder was made again."""

    def emit(self, record: logging.LogRecord) -> None:
        file = self.baseFilename
        if (
            self.stream is not None
            and not os.path.exists(file)
            and os.path.isdir(os.path.dirname(file))
        ):
            with contextlib.suppress(OSError):  # of a full disk
                self.stream.close()
            self.stream = None
        super().emit(record)

    def _open(self) -> TextIOWrapper:
        file = super()._open()
        os.fchmod(file.fileno(), 0o600)
        return file


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
