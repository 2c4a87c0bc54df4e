import asyncio
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from angpt.errors import UserError
from angpt.inference.generate import Text, Writer
from angpt.inference.sampling import GREEDY, Sampling
from angpt.models.folded import Folded
from angpt.serving import server as module
from angpt.serving.limits import Limits
from angpt.serving.protocol import Refused
from angpt.serving.scheduler import Piece
from angpt.serving.server import Server
from tests.serving.conftest import CONTEXT, TOKENIZER, Running, serving

JSON = {"Content-Type": "application/json"}


def ask(running: Running, path: str, body: Any = None, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    """Status and body of a request; a body makes it a POST, bytes are sent as they are."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    request = urllib.request.Request(running.address + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


def complete(running: Running, **options: Any) -> tuple[int, Any]:
    return ask(running, "/v1/completions", {"prompt": "ab"} | options)


def events(running: Running, **options: Any) -> list[str]:
    """The data of the events of a streamed answer."""
    status, text = complete(running, stream=True, **options)
    assert status == 200
    assert all(block.startswith("data: ") for block in text.split("\n\n")[:-1])
    return [block.removeprefix("data: ") for block in text.split("\n\n")[:-1]]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextmanager
def held(server: Server) -> Iterator[threading.Event]:
    """The model waits before each step until the event is set."""
    go, step = threading.Event(), server.batch.step

    def wait() -> None:
        assert go.wait(60)
        step()

    server.batch.step = wait  # type: ignore[method-assign]
    try:
        yield go
    finally:
        go.set()
        server.batch.step = step  # type: ignore[method-assign]


def connected(running: Running, **options: Any) -> socket.socket:
    """A connection that has sent a request and has not read the answer, which does not end with its first token."""
    host, port = running.address.removeprefix("http://").split(":")
    body = json.dumps({"prompt": "x", "max_tokens": 50, "temperature": 0} | options)
    client = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    client.sendall(f"{head}\r\n\r\n{body}".encode())
    return client


def test_the_text_is_that_of_generate(running: Running, alone: Callable[..., Text]) -> None:
    status, found = complete(running, prompt="def ", max_tokens=40, temperature=0)
    expected = alone("def ", 40, GREEDY)
    assert status == 200
    assert found["object"] == "text_completion"
    assert found["id"].startswith("cmpl-")
    assert found["model"] == "tiny"
    reason = "length" if expected.reason == "length" else "stop"
    choice = {"index": 0, "text": expected.text, "logprobs": None, "finish_reason": reason}
    assert found["choices"] == [choice]
    usage = {"prompt_tokens": 4, "completion_tokens": expected.tokens, "total_tokens": 4 + expected.tokens}
    assert found["usage"] == usage


def test_a_text_is_decoded_as_what_follows_its_prompt(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[list[int]] = []
    monkeypatch.setattr(module, "Writer", lambda *args: before.append(args[1]) or Writer(*args))
    complete(running, prompt=["ab", "c"], n=2)
    assert before == [[97, 98], [97, 98], [99], [99]]


def test_the_model_is_sampled_as_openai_documents_unless_told_otherwise(
    running: Running, alone: Callable[..., Text]
) -> None:
    choices = complete(running, seed=3)[1]["choices"]
    assert choices[0]["text"] == alone("ab", 16, Sampling(temperature=1, top_k=None), 3).text
    options = {"temperature": 0.7, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.2}
    choices = complete(running, seed=3, max_tokens=30, **options)[1]["choices"]
    assert choices[0]["text"] == alone("ab", 30, Sampling(1.2, 0.7, 30, 0.8, 0.01), 3).text
    assert len({complete(running)[1]["choices"][0]["text"] for _ in range(4)}) > 1  # each has a seed of its own


def test_each_choice_has_the_next_seed(running: Running, alone: Callable[..., Text]) -> None:
    how = Sampling(temperature=1, top_k=None)
    _, found = complete(running, prompt=["ab", "c"], n=2, seed=5)
    expected = [alone(prompt, 16, how, 5 + i) for i, prompt in enumerate(("ab", "ab", "c", "c"))]
    assert [(c["index"], c["text"]) for c in found["choices"]] == [(i, t.text) for i, t in enumerate(expected)]
    assert found["usage"]["prompt_tokens"] == 3
    assert found["usage"]["completion_tokens"] == sum(t.tokens for t in expected)


@pytest.mark.parametrize("prompt", [[97, 98], [[97, 98]], ["ab"], "ab"])
def test_a_prompt_is_text_or_token_ids(running: Running, prompt: Any) -> None:
    _, found = complete(running, prompt=prompt, seed=1)
    assert found["choices"] == complete(running, seed=1)[1]["choices"]


def test_an_empty_prompt_begins_a_document(running: Running, alone: Callable[..., Text]) -> None:
    assert complete(running, prompt="", temperature=0)[1]["choices"][0]["text"] == alone("", 16, GREEDY).text


def test_a_stop_string_ends_the_text(running: Running, alone: Callable[..., Text]) -> None:
    whole = alone("ab", 60, GREEDY).text
    stop = whole[20:23]
    _, found = complete(running, max_tokens=60, temperature=0, stop=[stop, "never"])
    assert found["choices"][0] == {
        "index": 0, "text": whole[: whole.index(stop)], "logprobs": None, "finish_reason": "stop"
    }  # fmt: skip
    assert found["choices"] == complete(running, max_tokens=60, temperature=0, stop=stop)[1]["choices"]
    assert found["usage"]["completion_tokens"] == alone("ab", 60, GREEDY, 0, (stop,)).tokens


def test_a_stream_has_the_same_text_in_pieces(running: Running) -> None:
    options = {"prompt": ["ab", "c"], "seed": 4, "max_tokens": 40}
    *chunks, done = events(running, **options)
    parsed = [json.loads(chunk) for chunk in chunks]
    _, whole = complete(running, **options)
    for index, choice in enumerate(whole["choices"]):
        mine = [chunk["choices"][0] for chunk in parsed if chunk["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert len(mine) > 5
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in parsed}) == 1
    *_, usage, done = events(running, stream_options={"include_usage": True}, **options)
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"] == whole["usage"]


def test_a_real_client(running: Running, alone: Callable[..., Text]) -> None:
    openai = pytest.importorskip("openai", reason="needs openai")
    with openai.OpenAI(base_url=f"{running.address}/v1", api_key="any", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert client.models.retrieve("tiny").owned_by == "angpt"
        ask = client.completions.create
        expected = alone("ab", 16, GREEDY)
        found = ask(model="tiny", prompt="ab", temperature=0)
        assert found.choices[0].text == expected.text
        assert found.usage.completion_tokens == expected.tokens
        assert ask(model="tiny", prompt=[97, 98], temperature=0).choices[0].text == expected.text
        pieces = ask(model="tiny", prompt="ab", temperature=0, stream=True, stream_options={"include_usage": True})
        chunks = list(pieces)
        assert "".join(c.text for chunk in chunks for c in chunk.choices) == expected.text
        assert chunks[-1].usage.completion_tokens == expected.tokens
        assert ask(model="tiny", prompt="ab", seed=1, extra_body={"top_k": 1}).choices[0].text == expected.text
        with pytest.raises(openai.NotFoundError, match="only 'tiny'") as unknown:
            ask(model="gpt-5", prompt="x")
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError, match="logprobs is not supported") as unsupported:
            ask(model="tiny", prompt="x", logprobs=2)
        assert unsupported.value.param == "logprobs"
        with pytest.raises(openai.NotFoundError, match="POST /v1/completions"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": None}, "'prompt' is missing"), ({"prompt": 3}, "prompt must be a string, a list of"),
        ({"prompt": []}, "prompt must be"), ({"prompt": ["a", 1]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": [[]]}, "prompt must be"), ({"prompt": {"a": 1}}, "prompt must be"),
        ({"prompt": [260]}, "token 260 of a prompt is not in the model's vocabulary of 260"),
        ({"prompt": [-1]}, "token -1"), ({"prompt": [10**30]}, "is not in the model's vocabulary"),
        ({"prompt": "\ud83d"}, "not valid Unicode"),
        ({"prompt": "x" * CONTEXT, "max_tokens": 2}, "ask for at most 1"),
        ({"prompt": "x" * 200}, "a prompt of 200 tokens and max_tokens of 16 exceed 96 tokens; shorten the prompt"),
        ({"max_tokens": 10**9}, "ask for at most 95"), ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": "9"}, "max_tokens must be a whole number, not '9'"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"), ({"temperature": -1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be in (0, 1]"), ({"top_k": -1}, "top_k must be 0 or more"),
        ({"repetition_penalty": 1e-45}, "repetition_penalty must be from 1e-06 to 1,000,000"),
        ({"n": 0}, "n must be from 1 to 128"),
        ({"n": 129}, "n must be from 1 to 128"), ({"prompt": ["a"] * 9, "n": 128}, "at most 308 texts, not 9 × 128"),
        ({"seed": -1}, "seed must be 0 or more"), ({"seed": 2**70}, "seed must be a number of at most 18 digits"),
        ({"stop": ""}, "stop must be up to 4 strings"), ({"stop": ["a"] * 5}, "stop must be up to 4 strings"),
        ({"stop": "x" * 1001}, "1 to 1,000 characters"), ({"stop": [1]}, "stop[0] must be a string"),
        ({"stream": 1}, "stream must be true or false"),
        ({"stream_options": {"x": 1}}, "unknown key 'stream_options.x'"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"logprobs": 0}, "logprobs is not supported"), ({"echo": True}, "echo is not supported"),
        ({"best_of": 3}, "best_of is not supported"), ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty is not supported"), ({"suffix": "x"}, "suffix is not supported"),
        ({"temprature": 1}, "unknown key 'temprature': did you mean temperature?"),
    ],
)  # fmt: skip
def test_a_bad_request_is_explained(shared: Running, options: dict[str, Any], message: str) -> None:
    status, found = complete(shared, **options)
    assert status == 400
    assert found["error"]["type"] == "invalid_request_error"
    assert message in found["error"]["message"]


@pytest.fixture(scope="module")
def shared(model: Folded) -> Iterator[Running]:
    """A server for requests that never reach the model."""
    with serving(model, Limits(batch=8, queue=300)) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "message"),
    [
        ("/v1/completions", b"{", JSON, 400, "not valid JSON"),
        ("/v1/completions", b"", JSON, 400, "not valid JSON"),
        ("/v1/completions", b"\xff\xfe\xfa", JSON, 400, "not valid JSON"),
        ("/v1/completions", b"[" * 200_000, JSON, 400, "nested too deeply"),
        ("/v1/completions", b"[]", JSON, 400, "the body must be a JSON object, not []"),
        ("/v1/completions", b'{"prompt": "x"}', {"Content-Type": "text/plain"}, 415, "application/json"),
        ("/v1/completions", b" " * (2**20 + 1), JSON, 413, "larger than 1,048,576 bytes"),
        ("/v1/completions", None, {}, 405, "GET /v1/completions: Method Not Allowed"),
        ("/v1/chat/completions", b"{}", JSON, 404, "there are POST /v1/completions"),
        ("/v1/models/other", None, {}, 404, "there is no model 'other' here, only 'tiny'"),
        ("/", None, {}, 404, "GET /: Not Found"),
    ],
)
def test_what_is_no_request_is_explained(
    shared: Running, path: str, body: bytes | None, headers: dict[str, str], status: int, message: str
) -> None:
    found, answer = ask(shared, path, body, headers)
    assert found == status
    assert message in answer["error"]["message"]


def test_options_that_change_nothing_are_accepted(running: Running) -> None:
    neutral = {"best_of": 1, "echo": False, "logprobs": None, "logit_bias": {}, "presence_penalty": 0.0, "user": "me"}
    _, expected = complete(running, seed=1)
    assert (
        complete(running, seed=1, suffix=None, stop=None, model="tiny", **neutral)[1]["choices"] == expected["choices"]
    )


def test_a_server_may_be_shorter_than_the_context(model: Folded, alone: Callable[..., Text]) -> None:
    with serving(model, Limits(batch=2, queue=0, max_length=20)) as running:
        assert running.server.batch.caches[0].keys.shape[2] == 20
        _, found = complete(running, max_tokens=19, temperature=0)
        assert found["choices"][0]["text"] == alone("ab", 19, GREEDY).text
        assert "exceed 20 tokens; ask for at most 19" in complete(running, max_tokens=20)[1]["error"]["message"]
        assert complete(running, n=2)[0] == 200
        assert "at most 2 texts, not 1 × 3" in complete(running, n=3)[1]["error"]["message"]


def test_requests_beyond_the_queue_are_told_to_come_back(model: Folded) -> None:
    with serving(model, Limits(batch=1, queue=2)) as running, held(running.server) as go:
        first = connected(running)
        until(lambda: len(running.server.scheduler.running) == 1)
        others = [connected(running) for _ in range(2)]
        until(lambda: len(running.server.scheduler.waiting) == 2)
        status, found = complete(running)
        assert (status, found["error"]["type"], found["error"]["code"]) == (429, "rate_limit_error", "queue_full")
        others.pop().close()  # its place in the queue is free again
        until(lambda: len(running.server.scheduler.waiting) == 1)
        others.append(connected(running))
        until(lambda: len(running.server.scheduler.waiting) == 2)
        go.set()
        for client in (first, *others):
            assert client.recv(4096).startswith(b"HTTP/1.1 200 OK")
            client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_away_frees_its_place(model: Folded, stream: bool, reset: bool) -> None:
    with serving(model, Limits(batch=1)) as running, held(running.server) as go:
        gone = connected(running, stream=stream)
        until(lambda: len(running.server.scheduler.running) == 1)
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))  # closes without a farewell
        gone.close()
        until(lambda: running.server.active == 0)
        go.set()
        assert complete(running, max_tokens=3)[0] == 200
        scheduler = running.server.scheduler
        assert (scheduler.cancelled, scheduler.running, running.server.batch.rows) == (1, [], [])
        assert scheduler.generated_tokens < 50


def test_health_and_metrics(running: Running) -> None:
    assert ask(running, "/health") == (200, {"status": "ok"})
    tokens = sum(complete(running, max_tokens=5, seed=i)[1]["usage"]["completion_tokens"] for i in range(3))
    complete(running, max_tokens=0)
    _, text = ask(running, "/metrics")
    lines = text.splitlines()
    for line in (
        f"angpt_generated_tokens_total {tokens}", "angpt_prompt_tokens_total 6", "angpt_texts_running 0",
        "angpt_texts_waiting 0", 'angpt_responses_total{status="200"} 4', 'angpt_responses_total{status="400"} 1',
        "angpt_first_text_seconds_count 3", "# TYPE angpt_generated_tokens_total counter",
    ):  # fmt: skip
        assert line in lines
    assert all(line.startswith("#") or len(line.split()) == 2 for line in lines)


def test_a_server_that_stops_finishes_its_requests(model: Folded, alone: Callable[..., Text]) -> None:
    with serving(model, Limits(batch=1, grace=60)) as running:
        with held(running.server) as go:
            clients = [connected(running) for _ in range(2)]  # one runs, one waits
            until(lambda: running.server.active == 2)
            running.loop.call_soon_threadsafe(running.server.stopping.set)
            until(lambda: not running.server.runner.sites)
            with pytest.raises(ConnectionRefusedError):
                connected(running)
            go.set()
        running.stop()
        for client in clients:
            _, body = client.makefile("rb").read().split(b"\r\n\r\n", 1)
            assert json.loads(body)["choices"][0]["text"] == alone("x", 50, GREEDY).text
            client.close()


def test_a_server_that_must_stop_tells_its_clients(model: Folded) -> None:
    with serving(model, Limits(batch=1, grace=0)) as running:
        with held(running.server) as go:
            whole, streamed = connected(running), connected(running, stream=True)
            until(lambda: running.server.active == 2)
            running.loop.call_soon_threadsafe(running.server.stopping.set)
            until(lambda: running.server.scheduler.stopped)
            go.set()
        running.stop()
        assert whole.recv(4096).startswith(b"HTTP/1.1 503 Service Unavailable")
        assert b'data: {"error": {"message": "the server is stopping"' in streamed.makefile("rb").read()
        whole.close()
        streamed.close()


def test_a_model_that_fails_ends_the_server(model: Folded) -> None:
    with serving(model, Limits()) as running:

        def fail() -> None:
            raise RuntimeError("CUDA error")

        running.server.batch.step = fail  # type: ignore[method-assign]
        status, found = complete(running, temperature=0)  # a sampled first token could end the text before any step
        assert (status, found["error"]["message"]) == (500, "the model has failed; the server is stopping")
        running.thread.join(60)
        assert isinstance(running.server.scheduler.failure, RuntimeError)


def test_a_client_may_be_gone_when_its_stream_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    class Gone:
        def __init__(self, headers: object) -> None: ...

        async def prepare(self, request: object) -> None: ...

        async def write(self, data: bytes) -> None:
            written.append(data)
            raise ConnectionResetError

    async def failing() -> AsyncIterator[tuple[int, Piece]]:
        raise Refused(500, "the model has failed")
        yield

    monkeypatch.setattr(web, "StreamResponse", Gone)
    asyncio.run(Server.stream(None, None, None, failing(), False))  # type: ignore[arg-type]
    assert [json.loads(data.removeprefix(b"data: "))["error"]["message"] for data in written] == [
        "the model has failed"
    ]


def test_a_mistake_of_the_server_is_logged_and_told(
    running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("angpt.serving.server.encode", lambda *_: [][0])
    status, found = complete(running)
    assert (status, found["error"]["type"]) == (500, "server_error")
    assert "IndexError" in caplog.text
    assert complete(running, prompt=[1])[0] == 200


def test_a_port_that_is_taken_is_explained(shared: Running, model: Folded) -> None:
    async def second() -> None:
        server = Server(model, TOKENIZER, "second", Limits())
        try:
            await server.start("127.0.0.1", int(shared.address.rsplit(":", 1)[1]))
        finally:
            await server.stop()

    with pytest.raises(UserError, match=r"cannot listen on 127\.0\.0\.1, port .*; choose another host or port"):
        asyncio.run(second())
