"""A thread that notices when rows stop moving, so that a rank that failed ends all others instead of leaving them waiting."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

log = logging.getLogger(__name__)


class Watch:
    """Looks at an exchange once a second: where its oldest move is not through within the group's timeout, gives it up.

    What waits for the missing rank is let go then, with wrong rows, and the next call of the exchange raises.
    """

    def __init__(self, exchange: Any, interval_s: float = 1.0) -> None:
        self._exchange, self._interval_s = weakref.ref(exchange), interval_s
        self._done, self._since = -1, time.monotonic()

    def start(self) -> None:
        """Look from now on, as long as the exchange and the process live."""
        threading.Thread(target=self._run, name="autotp exchange", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            exchange = self._exchange()
            if exchange is None:
                return
            self.look(exchange)
            del exchange

    def look(self, exchange: Any) -> None:
        """One look."""
        done, now = exchange.done.value, time.monotonic()
        if done >= exchange.queued:
            self._done, self._since = done, now
            return
        if exchange.broken:  # a rank that comes late writes smaller flags than those that let go
            exchange.give_up(exchange.broken)
            return
        if done != self._done:
            self._done, self._since = done, now
        elif now - self._since > exchange.group.timeout_s:
            reason = (
                f"{exchange.find_missing()} within {exchange.group.timeout_s:g} s. Every rank must run the same layers, in one "
                f"order: look for the error of the one that stopped. What was computed since is wrong: load the last checkpoint"
            )
            log.error("%s", reason)
            exchange.give_up(reason)
