"""Ends a process whose training loop hangs, and names the rank that causes it."""

import faulthandler
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

EXIT_HUNG = 5
CONNECT_SECONDS = 30.0
"""How long a connection to the store may take. PyTorch tries twice as long."""
SILENT_INTERVALS = 3
"""A rank that writes nothing for as many intervals is silent."""


class Watchdog:
    """Ends this process if its loop makes no progress for `timeout` seconds, and names the rank that hangs.

    Each rank writes the progress of its loop to a store, again and again. The rank that others wait for is one that has
    made less progress, or that no longer writes.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        store.set_timeout(timedelta(seconds=min(timeout, CONNECT_SECONDS)))  # of the new connection
        self.store, self.rank, self.size, self.timeout = store.clone(), rank, size, timeout
        self.terminal = os.dup(2)  # before the output of the rank goes to its log
        self.beats, self.signs, self.step, self.moved = 0, 0, 0, time.monotonic()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step: int) -> None:
        """The loop has reached a step."""
        self.beats, self.step, self.moved = self.beats + 1, step, time.monotonic()

    def stop(self) -> None:
        """Stop watching."""
        self.over.set()
        self.thread.join()
        os.close(self.terminal)

    def _watch(self) -> None:
        interval = min(10.0, self.timeout / 10)
        with suppress(RuntimeError):  # the store is gone: rank 0 or the launcher has ended, and this process will too
            while not self.over.wait(interval):
                self._sign()
                if time.monotonic() - self.moved <= self.timeout:
                    continue
                before = self._noted()
                for _ in range(SILENT_INTERVALS):  # of those that live, each signs in every interval
                    self.over.wait(interval)
                    self._sign()
                if not self.over.is_set() and time.monotonic() - self.moved > self.timeout:
                    why = self._verdict(before, SILENT_INTERVALS * interval)
                    message = f"error: no progress for {self.timeout:.0f} s in step {self.step + 1:,}: {why}"
                    faulthandler.dump_traceback(file=2)
                    os.write(self.terminal, f"{message}; continue with --resume\n".encode())
                    os._exit(EXIT_HUNG)

    def _sign(self) -> None:
        """Tell the others that this process lives. The count tells it without their clocks."""
        self.signs += 1
        self.store.set(str(self.rank), f"{self.beats} {self.signs}")

    def _noted(self) -> list[tuple[int, int]]:
        """The beats and the signs of each rank."""
        keys = map(str, range(self.size))
        texts = (self.store.get(key).decode() if self.store.check([key]) else "-1 0" for key in keys)
        return [(int(beats), int(signs)) for beats, signs in (text.split() for text in texts)]

    def _verdict(self, before: list[tuple[int, int]], seconds: float) -> str:
        """The part of the message that names the rank that hangs, given what was noted some seconds ago."""
        noted = self._noted()
        silent = [rank for rank, (old, new) in enumerate(zip(before, noted, strict=True)) if old == new]
        most = max(beats for beats, _ in noted)
        behind = [rank for rank, (beats, _) in enumerate(noted) if beats < most]
        if silent:
            return f"rank {listed(silent)} hangs: no sign of life for over {seconds:.0f} s"
        if behind:
            return f"rank {listed(behind)} hangs: the others wait for it"
        return "all ranks hang at the same point, which their logs show"


def listed(ranks: list[int]) -> str:
    """The first eight ranks, separated by commas."""
    return ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
