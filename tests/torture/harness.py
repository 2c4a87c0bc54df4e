"""Runs the `angpt` command in a process of its own, under limits, and says what is wrong with how it ended.

Processes are forked from a server that has imported everything, so that a case takes a fraction of a second.
"""

import codecs
import contextlib
import faulthandler
import fcntl
import gc
import hashlib
import multiprocessing as mp
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
LONG = os.environ.get("ANGPT_TORTURE") == "long"
SECONDS = 240.0
"""A command that takes longer hangs; the machine may be busy."""
BRIEF_SECONDS = 5.0
"""After this time `run_briefly` interrupts a command, which has accepted its input."""
BRIEF_MEMORY = 4 << 30
GOOD = (0, 3, 4)
"""Exit codes of a run that finished, was interrupted and saved, or diverged."""
PIPE_BYTES = 1 << 20
NOBODY = 65_534
"""User id without any rights."""
UNSTABLE = (".lock", ".verified.json")
"""Files whose contents differ between equal folders: who holds a lock, and times of files."""
WARNING = re.compile(r"warning: |note: |(\[rank\d+\]:)?\[W\d")
"""Begin of a line that is no error: warnings of ours, and of PyTorch about connections of ranks."""
CASES: Counter[str] = Counter()
"""How many cases of each kind the present test has had."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
for codec in ("utf-8-sig", "unicode-escape", "utf-16", "idna"):
    codecs.lookup(codec)  # now, because a user without rights may not read the modules of Python
PRELOADED = (
    "angpt.analysis.write",
    "angpt.cli.main",
    "angpt.evaluation.evaluate",
    "angpt.fits.hparam_figures",
    "angpt.fits.rules",
    "angpt.fits.scaling_figures",
    "angpt.inference.hf",
    "angpt.reports.page",
    "angpt.serving.server",
    "angpt.studies.study",
    "angpt.training.launch",
    "tests.torture.harness",
)


def count(short: int, long: int) -> range:
    """The numbers of the cases of a family, each of which is a seed."""
    return range(long if LONG else short)


def few(cases: Iterable[T], step: int) -> list[T]:
    """All cases in the long form, and every `step`-th in the short one."""
    return list(cases)[:: 1 if LONG else step]


@dataclass(frozen=True)
class Limits:
    """What is different for a process."""

    file_bytes: int | None = None
    """Largest size of a file: a disk that is full."""
    memory_bytes: int | None = None
    """Largest address space."""
    user: int | None = None
    """User id; only root can choose one."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    out: str
    err: str

    @property
    def problem(self) -> str | None:
        """What is wrong: neither success nor an error in one line; None if nothing is."""
        lines = [line for line in self.err.splitlines() if not WARNING.match(line)]
        if "Traceback" in self.err or "Exception ignored" in self.err:
            return f"a traceback, exit code {self.code}:\n{self.err}"
        if self.code in GOOD:
            return f"exit code {self.code}, but errors:\n{self.err}" if lines else None
        if self.code != 2:
            return f"exit code {self.code}:\n{self.err}"
        if len(lines) != 1 or not lines[0].startswith("error: "):
            return f"{len(lines)} lines instead of one:\n{self.err}"
        return None


class Command:
    """A running `angpt` command."""

    def __init__(self, folder: Path, args: Sequence[object], limits: Limits) -> None:
        self.pipes = [tempfile.mktemp(prefix="angpt-torture-") for _ in ("out", "err")]
        self.read = [_pipe(name) for name in self.pipes]
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self.process = context.Process(target=_child, args=(folder, [str(a) for a in args], limits, self.pipes))
        self.process.start()

    def begun(self) -> bool:
        """True if the process has got so far that it is the leader of a group and handles signals, or has ended."""
        try:
            return self.process.exitcode is not None or os.getpgid(self.process.pid) == self.process.pid
        except ProcessLookupError:
            return True

    def kill(self) -> None:
        """Kill −9 the command and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stack(self) -> str:
        """What it has written to standard error, and where its threads are."""
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(1)
        return os.read(self.read[1], PIPE_BYTES).decode(errors="replace")

    def wait(self, seconds: float = SECONDS) -> Outcome | None:
        """How it ended; None if it has not after so many seconds."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            return None
        out, err = map(_contents, self.read, self.pipes)
        return Outcome(self.process.exitcode, out, err)


def _pipe(name: str) -> int:
    """A named pipe, which unlike a file has no limit of its size and keeps what nobody reads yet."""
    os.mkfifo(name)
    handle = os.open(name, os.O_RDWR | os.O_NONBLOCK)
    fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return handle


def _contents(handle: int, name: str) -> str:
    """What a pipe holds, which is removed."""
    try:
        return os.read(handle, PIPE_BYTES).decode(errors="replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(handle)
        Path(name).unlink()


def _child(folder: Path, args: list[str], limits: Limits, pipes: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.setsid()  # a process group of its own, which can be killed
    for number, name in enumerate([os.devnull, *pipes]):
        os.dup2(os.open(name, os.O_WRONLY if number else os.O_RDONLY), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    faulthandler.register(signal.SIGUSR1)
    os.chdir(folder)
    os.environ |= limits.environment
    for kind, value in ((resource.RLIMIT_FSIZE, limits.file_bytes), (resource.RLIMIT_AS, limits.memory_bytes)):
        if value is not None:
            resource.setrlimit(kind, (value, value))
    if limits.user is not None:
        os.setgroups([])
        os.setgid(limits.user)
        os.setuid(limits.user)
    from angpt.cli.main import main

    sys.argv = ["angpt", *args]
    try:
        main(args)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()  # files that are closed only now may complain
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def run(folder: Path, *args: object, limits: Limits | None = None, seconds: float = SECONDS) -> Outcome:
    """How a command ends in a folder."""
    command = Command(folder, args, limits or Limits())
    outcome = command.wait(seconds)
    if outcome is None:
        stack = command.stack()
        command.kill()
        command.wait()
        return Outcome(-signal.SIGALRM, "", f"hangs: angpt {' '.join(map(str, args))}\n{stack}")
    return outcome


def run_briefly(folder: Path, *args: object) -> Outcome:
    """How a command ends that is interrupted where it would go on for long, and has little memory and no network."""
    limits = Limits(memory_bytes=BRIEF_MEMORY, environment={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    command = Command(folder, args, limits)
    while not command.begun():  # the machine may be busy
        time.sleep(0.01)
    outcome = command.wait(BRIEF_SECONDS)
    if outcome is not None:
        return outcome
    for _ in range(2):  # the first lets a run save, the second stops it at once
        with contextlib.suppress(ProcessLookupError):
            os.kill(command.process.pid, signal.SIGINT)
        if (outcome := command.wait(60.0)) is not None:
            return Outcome(0, "", "") if outcome.code in (0, 3, 130) else outcome
    stack = command.stack()
    command.kill()
    command.wait()
    return Outcome(-signal.SIGALRM, "", f"hangs, and cannot be interrupted: angpt {' '.join(map(str, args))}\n{stack}")


def kill_after(folder: Path, seconds: float, *args: object) -> Outcome | None:
    """Kill −9 a command after so many seconds; how it ended if that was before."""
    command = Command(folder, args, Limits())
    outcome = command.wait(seconds)
    if outcome is None:
        CASES["kills"] += 1
        command.kill()
        command.wait()
    return outcome


def succeed(folder: Path, *args: object, limits: Limits | None = None) -> Outcome:
    """A command that must succeed."""
    outcome = run(folder, *args, limits=limits)
    assert outcome.code == 0, (args, outcome)
    return outcome


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and contents of everything below a folder, by path, except UNSTABLE."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.name not in UNSTABLE):
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        elif path.is_file():
            content = hashlib.sha256(path.read_bytes()).digest()
        else:
            content = b""
        found[str(path.relative_to(folder))] = path.lstat().st_mode, content
    return found


def changes(before: Mapping[str, object], after: Mapping[str, object], allowed: Sequence[str] = ()) -> list[str]:
    """Paths that are new, gone or different, except those that begin with an `allowed` one."""
    different = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [path for path in different if not path.startswith(tuple(allowed))]


def seconds_of(folder: Path, *args: object) -> float:
    """How long a command takes."""
    start = time.monotonic()
    succeed(folder, *args)
    return time.monotonic() - start
