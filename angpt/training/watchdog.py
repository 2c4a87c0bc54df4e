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


class Watchdog:
    """Ends this process if its loop makes no progress for `timeout` seconds, and names the rank that hangs.

    Each rank writes the progress of its loop and the time to a store. The rank that others wait for is one that has
    made less progress, or that no longer writes.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        store.set_timeout(timedelta(seconds=min(timeout, CONNECT_SECONDS)))  # of the new connection
        self.store, self.rank, self.size, self.timeout = store.clone(), rank, size, timeout
        self.terminal = os.dup(2)  # before the output of the rank goes to its log
        self.beats, self.step, self.moved = 0, 0, time.monotonic()
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
                self.store.set(str(self.rank), f"{self.beats} {time.time()}")
                if time.monotonic() - self.moved > self.timeout:
                    where = f"no progress for {self.timeout:.0f} s in step {self.step + 1:,}"
                    message = f"error: {where}: {self._verdict(4 * interval)}; continue with --resume\n"
                    faulthandler.dump_traceback(file=2)
                    os.write(self.terminal, message.encode())
                    os._exit(EXIT_HUNG)

    def _verdict(self, silence: float) -> str:
        """The part of the message that names the rank that hangs."""
        noted = {}
        for rank in range(self.size):
            beats, at = self.store.get(str(rank)).decode().split() if self.store.check([str(rank)]) else ("-1", "0")
            noted[rank] = int(beats), float(at)
        silent = [rank for rank, (_, at) in noted.items() if time.time() - at > silence]
        most = max(beats for beats, _ in noted.values())
        behind = [rank for rank, (beats, _) in noted.items() if beats < most]
        if silent:
            return f"rank {listed(silent)} hangs: no sign of life for over {silence:.0f} s"
        if behind:
            return f"rank {listed(behind)} hangs: the others wait for it"
        return "all ranks hang at the same point, which their logs show"


def listed(ranks: list[int]) -> str:
    """The first eight ranks, separated by commas."""
    return ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
