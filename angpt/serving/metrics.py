"""What a server counts, in the text format of Prometheus."""

from collections.abc import Mapping

from angpt.serving.scheduler import Scheduler


def exposition(scheduler: Scheduler, responses: Mapping[int, int], first_seconds: float, firsts: int) -> str:
    """The metrics of a server; `first_seconds` is the time from a request to its first text, summed over requests."""
    values = (
        ("texts_running", "gauge", "Texts that are being generated.", len(scheduler.running)),
        ("texts_waiting", "gauge", "Texts that wait for a place in the batch.", len(scheduler.waiting)),
        ("texts_cancelled_total", "counter", "Texts whose client went away.", scheduler.cancelled),
        ("prompt_tokens_total", "counter", "Tokens of prompts that were read.", scheduler.prompt_tokens),
        ("generated_tokens_total", "counter", "Tokens that were generated.", scheduler.generated_tokens),
        ("decode_steps_total", "counter", "Steps, each of which adds a token to every text.", scheduler.steps),
    )
    lines = [line for name, kind, text, value in values for line in (*_head(name, kind, text), f"angpt_{name} {value}")]
    lines += _head("responses_total", "counter", "Answers by status.")
    lines += [f'angpt_responses_total{{status="{status}"}} {count}' for status, count in sorted(responses.items())]
    name = "first_text_seconds"
    lines += _head(name, "summary", "Time from a request to its first text.")
    lines += [f"angpt_{name}_sum {first_seconds:.6f}", f"angpt_{name}_count {firsts}"]
    return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP angpt_{name} {text}", f"# TYPE angpt_{name} {kind}"
