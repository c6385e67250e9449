"""Threads of a client's own, and what Python takes from them while a program ends."""

from __future__ import annotations

import threading


def program_ends(refused: RuntimeError) -> bool:
    """Whether the program's end is why no thread starts, or a pool of them takes nothing more.

    The main thread still counts as alive while Python waits for the threads of pools: only the error tells then. A pool
    of which a thread has ended so says that it is shut down, and no more why.
    """
    told = str(refused)
    return "interpreter shutdown" in told or "new futures" in told or not threading.main_thread().is_alive()


def start(thread: threading.Thread) -> None:
    """Raises RuntimeError where no thread is to be had: under a limit, or at the program's end, as Python sees it."""
    try:
        thread.start()
    except RuntimeError as error:
        if program_ends(error):
            error.add_note(f"{thread.name} needs a thread, and none starts in what atexit calls: begin before")
        raise
