"""The wire format of OpenAI's completions: requests, answers and errors as JSON."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from angpt.errors import UserError
from angpt.inference.sampling import Sampling
from angpt.serialization import check_settings, from_dict, parse_json, shown

NEUTRAL: Mapping[str, Any] = {
    "best_of": 1, "echo": False, "frequency_penalty": 0, "logit_bias": {}, "logprobs": None, "presence_penalty": 0,
    "suffix": "",
}  # fmt: skip
"""Options of OpenAI that are not supported, with the value that changes nothing, which is accepted."""
MAX_CHOICES = 128
"""Largest `n`, as in OpenAI's interface."""
MAX_STOPS, MAX_STOP_LENGTH = 4, 1000
"""Largest number of stop strings, as in OpenAI's interface, and of characters of each."""


class Refused(Exception):
    """A request that is answered with an error, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        kinds = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        kind = kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool = False
    """Send the counts of tokens in a last chunk."""


@dataclass(frozen=True)
class Request:
    """The body of a request for completions. What it leaves out is as in OpenAI's interface."""

    prompt: Any
    """A string, a list of strings, a list of token ids, or a list of those."""
    model: str = ""
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    n: int = 1
    stop: str | tuple[str, ...] = ()
    seed: int = field(default_factory=lambda: secrets.randbits(48))
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: str = ""
    """Ignored: who asks changes nothing."""

    def __post_init__(self) -> None:
        check_settings(self, "at least 1", lambda value: value >= 1, "max_tokens")
        check_settings(self, f"from 1 to {MAX_CHOICES}", lambda value: 1 <= value <= MAX_CHOICES, "n")
        check_settings(self, "0 or more", lambda value: value >= 0, "seed")
        if len(self.stops()) > MAX_STOPS or not all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stops()):
            raise UserError(f"stop must be up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH:,} characters")
        if self.stream_options.include_usage and not self.stream:
            raise UserError("stream_options needs stream; an answer that is not streamed has its usage anyway")
        self.sampling()

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    def sampling(self) -> Sampling:
        top_p = None if self.top_p == 1 else self.top_p
        return Sampling(self.repetition_penalty, self.temperature, self.top_k, top_p, self.min_p)

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, all as text or all as token ids."""
        given = [self.prompt] if isinstance(self.prompt, str) or _are_ids(self.prompt) else self.prompt
        if isinstance(given, list) and given and (all(isinstance(p, str) for p in given) or all(map(_are_ids, given))):
            return given
        raise UserError(
            f"prompt must be a string, a list of strings, a list of token ids or a list of such lists, not "
            f"{shown(self.prompt)}"
        )


def _are_ids(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is int for value in values)


def read_request(body: bytes) -> Request:
    """The request in a body of JSON. `null` is the same as no value."""
    try:
        values = parse_json(body)
        if not isinstance(values, dict):
            raise UserError(f"the body must be a JSON object, not {shown(values)}")
        given = {key: value for key, value in values.items() if value is not None}
        for name, neutral in NEUTRAL.items():
            if given.pop(name, neutral) != neutral:
                raise Refused(400, f"{name} is not supported; leave it out", "unsupported", name)
        return from_dict(Request, given)
    except UserError as error:
        raise Refused(400, str(error)) from error


class Answer:
    """The JSON of the answer to a request: `whole`, or in chunks."""

    def __init__(self, model: str, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_tokens = sum(map(len, prompts))
        self.head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[tuple[str, str | None]], tokens: int) -> dict[str, Any]:
        """All choices, each a text and why it ended."""
        listed = [choice(index, text, reason) for index, (text, reason) in enumerate(choices)]
        return self.head | {"choices": listed, "usage": self.usage(tokens)}

    def chunk(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A piece of the text of one choice."""
        return self.head | {"choices": [choice(index, text, reason)]}

    def last_chunk(self, tokens: int) -> dict[str, Any]:
        """The counts of tokens, without a choice."""
        return self.head | {"choices": [], "usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        prompt = self.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def choice(index: int, text: str, reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


def model_entry(model: str, created: int) -> dict[str, Any]:
    """A model as `/v1/models` describes it."""
    return {"id": model, "object": "model", "created": created, "owned_by": "angpt"}
