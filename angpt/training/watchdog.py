"""Ends a process that waits for another one in vain, and says for which."""

import faulthandler
import os
import threading
import time
from typing import Any

EXIT_HUNG = 5


class Watchdog:
    """Ends this process when the loop has not moved for `timeout` seconds, and says which rank holds it up.

    Each rank notes in a store how far its loop has come, and that it is alive. A rank that stands still, while others
    wait for it, is the one that has come least far, or has not been heard of.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        self.store, self.rank, self.size, self.timeout = store.clone(), rank, size, timeout
        self.terminal = os.dup(2)  # before the rank's words go to a log of its own
        self.beats, self.step, self.moved = 0, 0, time.monotonic()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()

    def beat(self, step: int) -> None:
        self.beats, self.step, self.moved = self.beats + 1, step, time.monotonic()

    def stop(self) -> None:
        self.over.set()
        self.thread.join()
        os.close(self.terminal)

    def _watch(self) -> None:
        interval = min(10.0, self.timeout / 10)
        while not self.over.wait(interval):
            try:
                self.store.set(str(self.rank), f"{self.beats} {time.time()}")
                if time.monotonic() - self.moved > self.timeout:
                    self._end(self._verdict(4 * interval))
            except RuntimeError:  # the store is gone, and with it rank 0 or its launcher, which ends this process too
                return

    def _verdict(self, silence: float) -> str:
        """Which rank the others wait for."""
        noted = {}
        for rank in range(self.size):
            beats, at = self.store.get(str(rank)).decode().split() if self.store.check([str(rank)]) else ("-1", "0")
            noted[rank] = int(beats), float(at)
        silent = [rank for rank, (_, at) in noted.items() if time.time() - at > silence]
        most = max(beats for beats, _ in noted.values())
        behind = [rank for rank, (beats, _) in noted.items() if beats < most]
        if silent:
            return f"rank {listed(silent)} stands still: not heard of for over {silence:.0f} s"
        if behind:
            return f"rank {listed(behind)} stands still: it has not come to where the others wait"
        return "all ranks have come to the same point; the logs of the run show where they stand"

    def _end(self, verdict: str) -> None:
        faulthandler.dump_traceback(file=2)
        told = f"error: no progress for {self.timeout:.0f} s in step {self.step + 1:,}: {verdict}; go on with --resume"
        os.write(self.terminal, f"{told}\n".encode())
        os._exit(EXIT_HUNG)


def listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" and more" if len(ranks) > 8 else "")
