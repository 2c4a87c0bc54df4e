"""Requests of a task and their scores, as files: making requests, scoring and computing metrics can happen on different
machines. A GPU node without network and without lm-eval needs only the requests."""

import hashlib
import json
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from angpt.errors import UserError
from angpt.serialization import from_dict, parse_json

T = TypeVar("T")
Tokens = Sequence[int]


@dataclass(frozen=True)
class Origin:
    """Everything that determines the requests of a task."""

    task: str
    data: str
    """Digest of the task's files, or `hub`."""
    limit: int | None
    """Number of first documents used (of each subject of MMLU); None: all."""
    harness: str
    """Version of lm-evaluation-harness."""
    tokenizer: str
    """Fingerprint of the tokenizer."""


@dataclass(frozen=True)
class Requests:
    """Pairs of context and continuation, as tokens, of which the model gives the log-probability."""

    origin: Origin
    samples: int
    """Number of documents that the requests are made from."""
    contexts: list[Tokens]
    """The distinct contexts."""
    context_of: list[int]
    """Index of the context of each request."""
    continuations: list[Tokens]

    @classmethod
    def of(cls, origin: Origin, samples: int, pairs: Sequence[tuple[Tokens, Tokens]]) -> "Requests":
        numbers: dict[tuple[int, ...], int] = {}
        context_of = [numbers.setdefault(tuple(context), len(numbers)) for context, _ in pairs]
        return cls(origin, samples, list(numbers), context_of, [continuation for _, continuation in pairs])

    def __len__(self) -> int:
        return len(self.continuations)

    @property
    def pairs(self) -> list[tuple[Tokens, Tokens]]:
        return [(self.contexts[c], text) for c, text in zip(self.context_of, self.continuations, strict=True)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokens; equal for equal tokens."""
        digest = hashlib.sha256()
        for name, array in sorted(self._arrays().items()):
            digest.update(f"{name} {array.dtype} {len(array)}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    @cached_property
    def max_token(self) -> int:
        return max(max(tokens, default=0) for tokens in (*self.contexts, *self.continuations))

    def save(self, path: Path) -> None:
        _save(path, self._arrays() | {"samples": np.array([self.samples])}, self.origin)

    @classmethod
    def load(cls, path: Path) -> "Requests":
        names = ("samples", "contexts", "context_lengths", "context_of", "texts", "text_lengths")
        arrays, origin = _load(path, Origin, names)
        contexts = _cut(arrays["contexts"], arrays["context_lengths"])
        texts = _cut(arrays["texts"], arrays["text_lengths"])
        return cls(origin, int(arrays["samples"][0]), contexts, arrays["context_of"].tolist(), texts)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        dtype = np.uint16 if self.max_token < 2**16 else np.uint32
        return {
            "contexts": np.concatenate([np.asarray(c, dtype) for c in self.contexts]),
            "context_lengths": np.array([len(c) for c in self.contexts], np.int32),
            "context_of": np.array(self.context_of, np.int32),
            "texts": np.concatenate([np.asarray(c, dtype) for c in self.continuations]),
            "text_lengths": np.array([len(c) for c in self.continuations], np.int32),
        }


@dataclass(frozen=True)
class Scored:
    """The model and requests that scores belong to, and how they were computed."""

    weights: str
    """SHA-256 of the trained weights."""
    requests: str
    """Digest of the requests."""
    precision: str
    device: str
    seconds: float
    cut: int
    """Number of requests that were longer than the model's context and lost the beginning of theirs."""
    windowed: int
    """Number of requests whose continuation is longer than the model's context, scored in windows."""


@dataclass(frozen=True)
class Scores:
    """Scores in the order of the requests."""

    scored: Scored
    logprob: NDArray[np.float64] = field(repr=False)
    """Log-probability of each continuation, in nats."""
    greedy: NDArray[np.bool_] = field(repr=False)
    """True if each token of the continuation is the most likely one."""

    def save(self, path: Path) -> None:
        _save(path, {"logprob": self.logprob, "greedy": self.greedy}, self.scored)

    @classmethod
    def load(cls, path: Path) -> "Scores":
        arrays, scored = _load(path, Scored, ("logprob", "greedy"))
        return cls(scored, arrays["logprob"], arrays["greedy"])


def _save(path: Path, arrays: dict[str, NDArray[Any]], about: Any) -> None:
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, part, metadata={"about": json.dumps(asdict(about))})
        part.replace(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be written ({error})") from error
    finally:
        with suppress(OSError):  # then it was not made
            part.unlink()


def _load(path: Path, cls: type[T], names: tuple[str, ...]) -> tuple[dict[str, NDArray[Any]], T]:
    try:
        with safe_open(path, framework="numpy") as file:
            about = from_dict(cls, parse_json((file.metadata() or {})["about"]), finite=True)
            return {name: file.get_tensor(name) for name in names}, about
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, UserError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it and create it again") from error


def _cut(tokens: NDArray[Any], lengths: NDArray[Any]) -> list[Tokens]:
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]
