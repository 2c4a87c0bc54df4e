import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from angpt.data.tokenizers import end_token, load_tokenizer
from angpt.inference.fold import fold
from angpt.inference.generate import Text, generate_text
from angpt.inference.sampling import Sampling
from angpt.models.folded import Folded
from angpt.serving.limits import Limits
from angpt.serving.server import Server
from tests.inference.conftest import byte_model

TOKENIZER = load_tokenizer("bytes")
END = end_token(TOKENIZER)
CONTEXT = 96


@pytest.fixture(scope="session")
def model() -> Folded:
    """A model in float64, in which the size of a batch cannot change a token by rounding."""
    return fold(byte_model(context=CONTEXT)).prepare("cpu", torch.float64)


@dataclass
class Running:
    """A server in a thread of its own."""

    address: str
    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stopping.set)
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextmanager
def serving(model: Folded, limits: Limits) -> Iterator[Running]:
    """A server on a free port."""
    started: list[Running] = []
    ready = threading.Event()

    async def run() -> None:
        server = Server(model, TOKENIZER, "tiny", limits)
        address = await server.start("127.0.0.1", 0)
        started.append(Running(address, server, server.loop, threading.current_thread()))
        ready.set()
        await server.stopping.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(60)
    try:
        yield started[0]
    finally:
        if thread.is_alive():
            started[0].stop()


@pytest.fixture
def running(model: Folded) -> Iterator[Running]:
    with serving(model, Limits(batch=8, queue=300, grace=5)) as server:
        yield server


@pytest.fixture
def alone(model: Folded) -> Callable[..., Text]:
    """What `angpt generate` writes for one prompt."""

    def write(prompt: str, tokens: int, how: Sampling, seed: int = 0, stop: tuple[str, ...] = ()) -> Text:
        return generate_text(model, TOKENIZER, [prompt], tokens, how, seed=seed, end=END, stop=stop)[0]

    return write
