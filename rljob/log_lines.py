"""Every log line of a component: one line of key=value on stderr. Part of `telemetry`, which hands it on."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO

_SECRET_KEYS = frozenset({"token", "pool_key", "password", "authorization", "redis_url"})


def configure_logging(component: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Make every event of structlog and of the standard library one line of key=value on stderr.

    Exceptions and line breaks are escaped into their line. Libraries speak from WARNING up. Values under the names of
    secrets are never printed.
    """
    import structlog

    def name_component(
        _logger: Any, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        event["component"] = component
        for key in _SECRET_KEYS & event.keys():
            event[key] = "***"
        return event

    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.add_log_level,
        name_component,
        structlog.processors.format_exc_info,
    ]
    order = ["time", "level", "component", "event"]
    render = structlog.processors.LogfmtRenderer(key_order=order, bool_as_flag=False)
    out, number = stream or sys.stderr, logging.getLevelNamesMapping()[level]
    structlog.configure(
        processors=[*shared, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(out),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(handlers=[handler], level=max(logging.WARNING, number), force=True)
    logging.captureWarnings(True)


def get_logger(**bound: Any) -> Any:
    """A structlog logger with `bound` in every line."""
    import structlog

    return structlog.get_logger(**bound)
