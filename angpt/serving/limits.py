"""The limits of a server, as the command line sets them."""

from dataclasses import dataclass

from angpt.serialization import check_settings


@dataclass(frozen=True)
class Limits:
    """How much a server takes on."""

    batch: int = 16
    """Largest number of texts that are generated at once; each has its part of the cache."""
    queue: int = 256
    """Largest number of texts that wait for a place; requests beyond it are answered with status 429."""
    max_length: int | None = None
    """Largest number of tokens of a prompt and its text, if less than the model's context; less needs less memory."""
    grace: float = 30.0
    """Seconds that requests may still take after Ctrl-C or SIGTERM; then they are cancelled."""

    def __post_init__(self) -> None:
        check_settings(self, "at least 1", lambda value: value >= 1, "batch", "max_length")
        check_settings(self, "0 or more", lambda value: value >= 0, "queue", "grace")
