"""The HTTP server: OpenAI's completions, health and metrics.

The event loop reads and writes; the model runs in the thread of the scheduler, and prompts are tokenized in others.
"""

import asyncio
import json
import logging
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from angpt.data.tokenizers import end_token
from angpt.errors import UserError
from angpt.inference.generate import Writer, checked, encode
from angpt.models.folded import Folded
from angpt.serialization import shown
from angpt.serving.batch import Batch
from angpt.serving.limits import Limits
from angpt.serving.metrics import exposition
from angpt.serving.protocol import Answer, Refused, Request, model_entry, read_request
from angpt.serving.scheduler import Busy, Job, Piece, Scheduler, Stopped

LOG = logging.getLogger(__name__)
MAX_BODY_BYTES = 2**20
POLL_SECONDS = 0.05
FORCED_SECONDS = 1.0
"""How long a connection may take to close when its request has been cancelled."""
EVENT_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a streamed answer; the last one keeps nginx from collecting it."""

Received = AsyncIterator[tuple[int, Piece]]
"""Pieces of text, each with the index of its choice."""


class Server:
    """Serves one model. All methods but `read` run in the event loop."""

    def __init__(self, model: Folded, tokenizer: Tokenizer, name: str, limits: Limits) -> None:
        self.tokenizer, self.name, self.limits, self.created = tokenizer, name, limits, int(time.time())
        self.end, self.vocab_size = end_token(tokenizer), model.cfg.vocab_size
        self.length = min(model.cfg.context, limits.max_length or model.cfg.context)
        self.loop, self.stopping = asyncio.get_running_loop(), asyncio.Event()
        failed = partial(self.loop.call_soon_threadsafe, self.stopping.set)
        self.batch = Batch(model, limits.batch, self.length)
        self.scheduler = Scheduler(self.batch, limits.queue, on_failure=failed)
        self.active = 0
        self.responses: Counter[int] = Counter()
        self.first_text_seconds, self.first_texts = 0.0, 0
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self.errors_as_json])
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model}", self.model)
        app.router.add_get("/health", self.health)
        app.router.add_get("/metrics", self.metrics)
        # With handler_cancellation the handler of a client that goes away is cancelled.
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=FORCED_SECONDS, access_log=None)

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the address. Port 0 is any free port."""
        await self.runner.setup()
        site = web.TCPSite(self.runner, host, port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot listen on {host}, port {port} ({error}); choose another host or port") from error
        address = f"[{host}]" if ":" in host else host
        return f"http://{address}:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Stop listening, let requests end for `limits.grace` seconds, then cancel the others."""
        self.stopping.set()
        for site in self.runner.sites:
            await site.stop()
        deadline = self.loop.time() + self.limits.grace
        while self.active and self.loop.time() < deadline and self.scheduler.failure is None:
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self.scheduler.stop)
        await self.runner.cleanup()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        if request.content_type != "application/json":  # which a page of another site cannot send unasked
            raise Refused(415, "the request must have the header Content-Type: application/json")
        start = time.perf_counter()
        wanted, prompts = await asyncio.to_thread(self.read, await request.read())
        pieces: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()

        def deliver(index: int, piece: Piece) -> None:
            self.loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

        sampling, stops, jobs = wanted.sampling(), wanted.stops(), []
        for index in range(len(prompts) * wanted.n):
            prompt = prompts[index // wanted.n]
            writer = Writer(self.tokenizer, prompt, stops, self.end)
            row = prompt, wanted.max_tokens, sampling, wanted.seed + index
            jobs.append(Job(*row, writer, partial(deliver, index)))
        self.active += 1
        try:
            self.submit(jobs)
            answer, received = Answer(self.name, prompts), self.received(len(jobs), pieces, start)
            if wanted.stream:
                return await self.stream(request, answer, received, wanted.stream_options.include_usage)
            return await self.whole(answer, received)
        finally:
            self.scheduler.cancel(jobs)
            self.active -= 1

    def read(self, body: bytes) -> tuple[Request, list[list[int]]]:
        """The request in a body, and its prompts as token ids; refuses what the model or the limits do not allow."""
        wanted = read_request(body)
        if wanted.model not in ("", self.name):
            raise self.unknown(wanted.model)
        most = self.limits.batch + self.limits.queue
        try:
            prompts = wanted.prompts()
            if len(prompts) * wanted.n > most:
                raise UserError(f"a request may ask for at most {most} texts, not {len(prompts)} × {wanted.n}")
            rows = [encode(self.tokenizer, p, self.end) if isinstance(p, str) else p for p in prompts]
            rows = checked(rows, self.vocab_size)
        except UserError as error:
            raise Refused(400, str(error), param="prompt") from error
        longest = max(map(len, rows))
        room = self.length + 1 - longest  # the last token is not read again
        if wanted.max_tokens > room:
            advice = f"ask for at most {room:,}" if room > 0 else "shorten the prompt"
            asked = f"a prompt of {longest:,} tokens and max_tokens of {wanted.max_tokens:,}"
            message = f"{asked} exceed {self.length:,} tokens; {advice}"
            raise Refused(400, message, "context_length_exceeded", "max_tokens")
        return wanted, rows

    def submit(self, jobs: list[Job]) -> None:
        try:
            if self.stopping.is_set():
                raise Stopped
            self.scheduler.submit(jobs)
        except Busy as error:
            raise Refused(429, "too many texts are waiting already; try again later", "queue_full") from error
        except Stopped as error:
            raise self.stopped() from error

    async def received(self, jobs: int, pieces: asyncio.Queue[tuple[int, Piece]], start: float) -> Received:
        """The pieces of a request as they come, each with the index of its choice, until all choices have ended."""
        first = True
        while jobs:
            index, piece = await pieces.get()
            if piece.reason == "failed":
                raise self.stopped()
            if first:
                first = False
                self.first_text_seconds += time.perf_counter() - start
                self.first_texts += 1
            jobs -= piece.reason is not None
            yield index, piece

    async def whole(self, answer: Answer, received: Received) -> web.Response:
        """All choices in one body."""
        found: dict[int, list[Piece]] = {}
        async for index, piece in received:
            found.setdefault(index, []).append(piece)
        choices = [("".join(piece.text for piece in found[i]), found[i][-1].reason) for i in sorted(found)]
        return web.json_response(answer.whole(choices, sum(pieces[-1].tokens for pieces in found.values())))

    async def stream(
        self, request: web.Request, answer: Answer, received: Received, with_usage: bool
    ) -> web.StreamResponse:
        """Server-sent events: a chunk for each piece, then [DONE]. A failure is a last chunk with an error instead."""
        response = web.StreamResponse(headers=EVENT_STREAM)

        async def send(data: str) -> None:
            await response.write(f"data: {data}\n\n".encode())

        tokens = 0
        with suppress(ConnectionResetError):  # the client has gone away
            await response.prepare(request)
            try:
                async for index, piece in received:
                    await send(json.dumps(answer.chunk(index, piece.text, piece.reason)))
                    tokens += piece.tokens if piece.reason is not None else 0
                if with_usage:
                    await send(json.dumps(answer.last_chunk(tokens)))
                await send("[DONE]")
            except Refused as error:
                await send(json.dumps(error.body()))
        return response

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [model_entry(self.name, self.created)]})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/NAME."""
        if (name := request.match_info["model"]) != self.name:
            raise self.unknown(name)
        return web.json_response(model_entry(self.name, self.created))

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200; 503 if the server is stopping, 500 if the model has failed."""
        if self.stopping.is_set():
            raise self.stopped()
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics, for Prometheus."""
        text = exposition(self.scheduler, self.responses, self.first_text_seconds, self.first_texts)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def unknown(self, model: str) -> Refused:
        return Refused(404, f"there is no model {shown(model)} here, only {self.name!r}", "model_not_found", "model")

    def stopped(self) -> Refused:
        if self.scheduler.failure is not None:
            return Refused(500, "the model has failed; the server is stopping")
        return Refused(503, "the server is stopping")

    @web.middleware
    async def errors_as_json(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer errors in OpenAI's form, and count the answers by status."""
        response: web.StreamResponse
        try:
            response = await handler(request)
        except Refused as error:
            retry = {"Retry-After": "1"} if error.status in (429, 503) else None
            response = web.json_response(error.body(), status=error.status, headers=retry)
        except web.HTTPException as error:
            response = web.json_response(refusal(request, error).body(), status=error.status)
        except Exception:
            LOG.exception("%s %s", request.method, request.path)
            response = web.json_response(
                Refused(500, "the server has made a mistake; its log has more").body(), status=500
            )
        self.responses[response.status] += 1
        return response


def refusal(request: web.Request, error: web.HTTPException) -> Refused:
    """What the HTTP library refuses, in OpenAI's form."""
    if error.status == 413:
        return Refused(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    known = "POST /v1/completions, GET /v1/models, GET /health, GET /metrics"
    return Refused(error.status, f"{request.method} {request.path}: {error.reason}; there are {known}")


async def serve(
    model: Folded, tokenizer: Tokenizer, name: str, limits: Limits, host: str, port: int,
    announce: Callable[[str, Server], Any],
) -> None:  # fmt: skip
    """Serve until Ctrl-C or SIGTERM; a second one ends the process at once. Raises the error of a model that fails.
    `announce` is called with the address."""
    server = Server(model, tokenizer, name, limits)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        server.loop.add_signal_handler(number, server.stopping.set)
    try:
        announce(await server.start(host, port), server)
        await server.stopping.wait()
    finally:
        for number in before:
            server.loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        await server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)
    if server.scheduler.failure is not None:
        raise server.scheduler.failure
