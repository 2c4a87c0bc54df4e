"""The command `angpt` with one rank that goes wrong in the first attempt: FAULT=KIND:RANK:STEP in the environment.

die: killed in a step; save: killed in the middle of a checkpoint; hang: never comes to a step; freeze: stopped in one.
"""

import os
import signal
import time

from angpt.cli.main import main
from angpt.training.parallel import restarted
from angpt.training.sharded import Writer
from angpt.training.trainer import Trainer

kind, rank, step = os.environ["FAULT"].split(":")
train_step, complete, beat = Trainer.train_step, Writer._complete, Trainer.prefetch


def faulty_step(self, batch):
    if self.step + 1 == int(step):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
    return train_step(self, batch)


def faulty_complete(self, written, part, state):
    if state.step == int(step):
        written.result()
        os.kill(os.getpid(), signal.SIGKILL)
    complete(self, written, part, state)


def faulty_prefetch(self, loader):
    def batches():
        with beat(self, loader) as inner:
            for number, batch in enumerate(inner, start=self.step + 1):
                if number == int(step):
                    time.sleep(1000)
                yield batch

    class Slow:
        __enter__ = lambda _: batches()  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

    return Slow()


if __name__ == "__main__":
    if os.environ["RANK"] == rank and not restarted():
        match kind:
            case "die" | "freeze":
                Trainer.train_step = faulty_step
            case "save":
                Writer._complete = faulty_complete
            case "hang":
                Trainer.prefetch = faulty_prefetch
    main()
