"""Threads for what may take long: the end of the process waits for none of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Answer = TypeVar("Answer")


async def in_thread(call: Callable[[], Answer]) -> Answer:
    """The answer of a function that is called in a daemon thread."""
    # Not asyncio.to_thread(): whose threads the event loop waits for at its end.
    answer: Future[Answer] = Future()
    answer.set_running_or_notify_cancel()

    def work() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, name="hermes-web", daemon=True).start()
    return await asyncio.wrap_future(answer)
