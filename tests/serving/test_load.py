"""Many clients at once, some of which go away or send nonsense: nothing is lost, and nothing is mixed up."""

import asyncio
import io
import json
import random
import re
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from angpt.inference.generate import Text
from angpt.inference.sampling import Sampling
from angpt.models.folded import Folded
from angpt.serving.limits import Limits
from tests.serving.conftest import CONTEXT, serving

REQUESTS = 200


def mixed(rng: random.Random, number: int) -> dict[str, Any]:
    """A request unlike the others."""
    prompt = "".join(rng.choice("abcdef \n") for _ in range(rng.randrange(40)))
    options: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randrange(1, CONTEXT - 40), "seed": number}
    options["temperature"] = rng.choice([0, 0.7, 1.0, 1.5])
    for name, value in (
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.02),
        ("repetition_penalty", 1.3),
        ("stop", ["a", "é"]),
    ):
        if rng.random() < 0.2:
            options[name] = value
    return options | {"stream": rng.random() < 0.5}


def expected(alone: Callable[..., Text], options: dict[str, Any]) -> Text:
    how = Sampling(
        options.get("repetition_penalty", 1.0), options["temperature"], options.get("top_k"), options.get("top_p"),
        options.get("min_p"),
    )  # fmt: skip
    return alone(options["prompt"], options["max_tokens"], how, options["seed"], tuple(options.get("stop", ())))


async def text_of(client: aiohttp.ClientSession, url: str, options: dict[str, Any]) -> tuple[str, str]:
    """Text and reason of its end, of either form of the answer."""
    async with client.post(url, json=options) as response:
        assert response.status == 200, await response.text()
        if not options["stream"]:
            choice = (await response.json())["choices"][0]
            return choice["text"], choice["finish_reason"]
        *blocks, done = re.findall("data: (.*)\n\n", await response.text())
    assert done == "[DONE]"
    pieces = [json.loads(block)["choices"][0] for block in blocks]
    return "".join(piece["text"] for piece in pieces), pieces[-1]["finish_reason"]


async def leaves(client: aiohttp.ClientSession, url: str, rng: random.Random, options: dict[str, Any]) -> None:
    """A client that closes its connection at any moment: before, during or after the answer."""
    try:
        async with asyncio.timeout(rng.random() * 0.5), client.post(url, json=options) as response:
            await response.content.readany()
            response.close()
    except TimeoutError:
        pass


async def nonsense(client: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> int:
    async with client.post(url, data=io.BytesIO(body), headers=headers) as response:
        return response.status


@pytest.mark.slow
def test_two_hundred_clients_at_once(
    model: Folded, alone: Callable[..., Text], caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(0)
    good = [mixed(rng, number) for number in range(REQUESTS)]
    bad = [b"{", b'{"prompt": 1}', b'{"prompt": "x", "max_tokens": "many"}', b"\0" * 100, b" " * (2**20 + 1)]

    async def everyone(url: str) -> tuple[list[Any], list[Any]]:
        connector, json_header = aiohttp.TCPConnector(limit=0), {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(connector=connector) as client:
            answers = [text_of(client, url, options) for options in good]
            others = [leaves(client, url, rng, mixed(rng, number)) for number in range(60)]
            refused = [nonsense(client, url, body, json_header) for body in bad * 4]
            tasks = [*answers, *others, *refused]
            order = rng.sample(range(len(tasks)), len(tasks))
            shuffled = await asyncio.gather(*(tasks[place] for place in order))
            found = dict(zip(order, shuffled, strict=True))
        return [found[i] for i in range(REQUESTS)], [found[i] for i in range(len(tasks) - len(refused), len(tasks))]

    with serving(model, Limits(batch=12, queue=300)) as running:
        found, refusals = asyncio.run(everyone(f"{running.address}/v1/completions"))
        scheduler, server = running.server.scheduler, running.server
    assert refusals == [400, 400, 400, 400, 413] * 4
    for options, (text, reason) in zip(good, found, strict=True):
        wanted = expected(alone, options)
        assert (text, reason) == (wanted.text, "length" if wanted.reason == "length" else "stop"), options
    assert scheduler.failure is None
    assert caplog.records == []
    assert scheduler.cancelled > 0
    assert (scheduler.running, list(scheduler.waiting), server.batch.rows, server.active) == ([], [], [], 0)
    assert scheduler.generated_tokens > 2 * scheduler.steps  # they ran together
