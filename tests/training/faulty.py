"""The command `angpt` with one rank that goes wrong in the first attempt: FAULT=KIND:RANK:STEP in the environment.

die: killed in a step; save: killed in the middle of a checkpoint; hang: never comes to a step; freeze: stopped in one;
flip: a bit of a vector changes after a step; slow: writes the checkpoint of a step, and ends, later than the others.
"""

import atexit
import os
import signal
import time

import torch

from angpt.cli.main import main
from angpt.training import checkpoint
from angpt.training.ranks import restarted
from angpt.training.trainer import Trainer

kind, rank, step = os.environ["FAULT"].split(":")
train_step, write_files, beat = Trainer.train_step, checkpoint.write_files, Trainer.prefetch


def faulty_step(self, batch):
    if kind == "flip":
        done = train_step(self, batch)
        if self.step + 1 == int(step):
            vector = next(p for p in self.engine.parameters.values() if p.ndim == 1)
            vector.detach().view(torch.int32)[0] ^= 1
        return done
    if self.step + 1 == int(step):
        self.writer.finish()  # the checkpoint of an earlier step
        os.kill(os.getpid(), signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
    return train_step(self, batch)


def faulty_write(part, *args):
    sums = write_files(part, *args)
    if part.name.endswith(f"-{int(step):09d}"):
        os.kill(os.getpid(), signal.SIGKILL)
    return sums


def slow_write(part, *args):
    if part.name.endswith(f"-{int(step):09d}"):
        time.sleep(3)
    return write_files(part, *args)


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
            case "die" | "freeze" | "flip":
                Trainer.train_step = faulty_step
            case "save":
                checkpoint.write_files = faulty_write
            case "slow":
                checkpoint.write_files = slow_write
                atexit.register(time.sleep, 1)
            case "hang":
                Trainer.prefetch = faulty_prefetch
    main()
