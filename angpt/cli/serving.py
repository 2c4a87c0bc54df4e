"""The command `angpt serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from angpt.cli.inference import place
from angpt.config import Device, Precision
from angpt.present.terminal import terminal
from angpt.serving.limits import Limits

if TYPE_CHECKING:
    from angpt.serving.server import Server


def serve_command(
    model: Annotated[Path, tyro.conf.Positional],
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Annotated[Limits, tyro.conf.arg(name="")] = Limits(),  # noqa: B008
    device: Device = "auto",
    precision: Precision = "auto",
) -> None:
    """Serve a trained model over HTTP, in the form of OpenAI's completions.

    For example, the second in another terminal:
        angpt serve runs/angpt-laptop-s0
        curl http://127.0.0.1:8000/v1/completions --json '{"prompt": "def "}'

    OpenAI's clients work with base_url http://127.0.0.1:8000/v1 and any key. Options of a request: prompt (text, token
    ids, or a list of either), max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stop, seed, n, stream,
    stream_options. Others get an error that names them. Texts of several requests are generated together; each is what
    `angpt generate` writes for it alone with the same options and seed. There are also GET /v1/models, /health, and
    /metrics for Prometheus.

    There are no keys and no encryption: before others can connect, put a proxy in front that has them.

    Args:
        model: A run folder, a folded model or an export.
        host: Address to listen on; 127.0.0.1 answers this machine only, 0.0.0.0 everyone.
        port: Port to listen on; 0 takes a free one.
        limits: How much the server takes on.
        device: cpu, cuda, or auto: cuda if there is a GPU.
        precision: Precision of the matrices: fp32, bf16, or auto: bf16 on a GPU.
    """
    import asyncio

    from angpt.inference.source import open_source
    from angpt.serving.server import serve

    console, source = terminal(), open_source(model)
    tokenizer = source.tokenizer()
    folded, name = place(source.folded(), device, precision), model.resolve().name

    def announce(address: str, server: "Server") -> None:
        cache = f"up to {limits.batch} texts at once, cache of {server.batch.cache_bytes / 2**20:,.0f} MiB"
        console.print(f"{name}: {server.length:,} tokens of context, {folded.dtype} on {folded.device}, {cache}")
        console.print(f"{address}/v1/completions answers; Ctrl-C ends it")

    asyncio.run(serve(folded, tokenizer, name, limits, host, port, announce))
