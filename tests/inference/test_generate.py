import copy
import gc
import pickle
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor
from torch._dynamo.utils import counters

from angpt.data.tokenizers import end_of_text_id, load_tokenizer
from angpt.errors import UserError
from angpt.fast import tuning
from angpt.inference import engine
from angpt.inference import generate as module
from angpt.inference.engine import Engine
from angpt.inference.fold import fold
from angpt.inference.generate import Writer, generate, generate_text, started
from angpt.inference.sampling import GREEDY, Sampling
from angpt.models.decoder import Decoder
from angpt.models.folded import Folded, read_prompts
from angpt.models.variants import ARCHITECTURES, build
from tests.inference.conftest import byte_model
from tests.models.conftest import some_tokens, tiny

END = 256
UNEVEN = [[1, 2, 3], [4] * 30, [7], [5, 6] * 9]


@torch.no_grad()
def uncached(model: Decoder, tokens: Tensor, new_tokens: int) -> Tensor:
    """Greedy decoding as one forward pass of the trained model over everything for each token."""
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens


@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
def test_cached_and_uncached_greedy_tokens_are_the_same_for_200_steps(name: str) -> None:
    model, prompt = tiny(name, context=256).float(), some_tokens(2, 7)
    found = generate(model, prompt, 200, sampling=GREEDY)
    assert found == uncached(model, prompt, 200)[:, 7:].tolist()
    assert len(set(found[0])) > 1


@torch.no_grad()
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_greedy_token_is_the_likeliest_in_one_pass_of_the_trained_model(name: str) -> None:
    model, prompt = tiny(name, context=256).float(), some_tokens(2, 7)
    whole = torch.cat([prompt, torch.tensor(generate(model, prompt, 200, sampling=GREEDY))], dim=1)
    assert torch.equal(model(whole)[:, 6:-1].argmax(dim=-1), whole[:, 7:])


@pytest.mark.parametrize("name", ["gpt+", "ngpt", "angpt"])
@pytest.mark.parametrize("how", [GREEDY, Sampling(temperature=1.0, top_k=None), Sampling(repetition_penalty=1.3)])
def test_prompts_in_a_batch_give_what_they_give_alone(name: str, how: Sampling) -> None:
    model = fold(tiny(name, context=128).float())
    together = generate(model, UNEVEN, 40, how, seed=5)
    for row, prompt in enumerate(UNEVEN):
        assert generate(model, [prompt], 40, how, seed=5 + row) == [together[row]]


def test_a_seed_repeats_a_sample() -> None:
    model = fold(byte_model())
    assert generate(model, [[1]], 30, seed=1) == generate(model, [[1]], 30, seed=1)
    assert generate(model, [[1]], 30, seed=1) != generate(model, [[1]], 30, seed=2)


def test_an_engine_that_is_used_again_remembers_nothing() -> None:
    model, how = fold(byte_model()), Sampling(temperature=1.0, repetition_penalty=2.0)
    first = generate(model, UNEVEN, 20, how, seed=3)
    engine = model.engine
    assert generate(model, [p[::-1] for p in UNEVEN], 20, how, seed=9) != first
    assert generate(model, UNEVEN, 20, how, seed=3) == first
    assert model.engine is engine


def test_the_penalty_makes_repetition_rarer() -> None:
    model = fold(byte_model())
    plain = generate(model, [[1, 2]], 60, GREEDY)[0]
    varied = generate(model, [[1, 2]], 60, Sampling(temperature=0, repetition_penalty=5.0))[0]
    assert len(set(varied)) > len(set(plain))
    assert 1 not in varied[:20]  # of the prompt


@torch.no_grad()
def slid(model: Decoder, prompt: list[int], window: int, new_tokens: int) -> list[int]:
    """Greedy tokens where each position attends to the `window` last ones, by an explicit mask over all positions."""
    tokens = torch.tensor([prompt[-window:]])
    for _ in range(new_tokens):
        h, ctx = model.start(tokens)
        index = torch.arange(tokens.shape[1])
        age = index[:, None] - index
        ctx = ctx._replace(mask=((age >= 0) & (age < window))[None, None])
        for block in model.blocks:
            h = block(h, ctx)
        tokens = torch.cat([tokens, model.head(h)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return tokens[0, -new_tokens:].tolist()


@pytest.mark.parametrize("length", [3, 20, 50])
def test_a_sliding_window_sees_the_last_tokens(length: int) -> None:
    small, large = tiny(context=24).float(), tiny(context=512).float()  # the same weights
    prompt = some_tokens(1, length, seed=length)[0].tolist()
    found = generate(small, [prompt], 60, GREEDY, sliding=True)[0]
    assert found == slid(large, prompt, 24, 60)
    assert found != generate(large, [prompt], 60, GREEDY)[0]


def test_rows_of_a_sliding_batch_are_independent() -> None:
    model = fold(tiny(context=24).float())
    prompts = [some_tokens(1, n, seed=n)[0].tolist() for n in (2, 23, 40)]
    together = generate(model, prompts, 70, GREEDY, sliding=True)
    assert together == [generate(model, [p], 70, GREEDY, sliding=True)[0] for p in prompts]


def test_a_row_ends_with_the_end_token_and_the_others_go_on() -> None:
    model = fold(byte_model())
    free = generate(model, UNEVEN, 30, seed=1)
    end = free[0][11]
    found = generate(model, UNEVEN, 30, seed=1, end=end)
    for row, tokens in zip(free, found, strict=True):
        assert tokens == (row[: row.index(end) + 1] if end in row else row)
    assert len(found[0]) <= 12


def test_looking_seldom_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host looks at the tokens now and then, and what lies behind an end is dropped."""
    model = fold(byte_model())
    end = generate(model, UNEVEN, 30, seed=1)[0][11]
    expected = generate(model, UNEVEN, 30, seed=1, end=end)
    seldom = Engine(model, len(UNEVEN), 64, 30, Sampling())
    seldom.start(UNEVEN, 1)
    steps = seldom.advance
    monkeypatch.setattr(seldom, "advance", lambda: [steps() for _ in range(min(7, 30 - seldom.made))])
    assert module.collect(seldom, end, None) == expected


@pytest.mark.parametrize("prompt", [100, 127, 128, 129])
def test_the_part_of_the_cache_that_is_looked_at_grows_with_the_text(prompt: int) -> None:
    model = tiny(context=512).float()
    tokens = some_tokens(1, prompt)
    assert generate(model, tokens, 160, GREEDY) == uncached(model, tokens, 160)[:, prompt:].tolist()


def test_slots_that_are_shown() -> None:
    engine = Engine(fold(tiny(context=512)), 1, 512, 1, GREEDY)
    shown = {}
    for engine.longest in (1, 127, 128, 255, 256, 511, 512, 700):
        shown[engine.longest] = engine.shown()
    assert shown == {1: 128, 127: 128, 128: 256, 255: 256, 256: 512, 511: 512, 512: 512, 700: 512}


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
@pytest.mark.filterwarnings("default")  # inductor and its dependencies warn about themselves
def test_compiled_once_for_all_layers_the_tokens_are_the_same() -> None:
    model = fold(tiny(context=128, n_layers=3).float())
    expected = generate(model, UNEVEN, 30, GREEDY)
    torch._dynamo.reset()
    counters.clear()
    assert generate(model, UNEVEN, 30, GREEDY, step="compiled") == expected
    assert counters["stats"]["unique_graphs"] == 2  # of prompts and of a step


@torch.no_grad()
def test_prompts_of_another_length_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(*args, **options, backend="eager"))
    monkeypatch.setattr(engine, "compiled_prompt_layer", engine.compiled_prompt_layer.__wrapped__)
    model = fold(tiny(context=128, n_layers=2).float())
    torch._dynamo.reset()
    counters.clear()
    readers = {step: engine.reader_of(model, step) for step in ("compiled", "plain")}
    for length in (5, 9, 2, 64, 17):
        lengths = torch.full((2,), length)
        found = [read(some_tokens(2, length), lengths, model.make_caches(2, 128)) for read in readers.values()]
        torch.testing.assert_close(*found)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_step_is_compiled_for_as_many_batches_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the eight shapes that PyTorch allows by default."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compile_(args[0], fullgraph=True, backend="eager"))
    for name in ("compiled_layer", "compiled_prompt_layer"):
        monkeypatch.setattr(engine, name, getattr(engine, name).__wrapped__)
    model = fold(tiny(context=16, n_layers=1).float())
    torch._dynamo.reset()
    for rows in range(1, 12):
        assert len(generate(model, [[1]] * rows, 2, GREEDY, step="compiled")) == rows


@pytest.mark.parametrize(
    ("longest", "slots", "length"),
    [(1, 99, 12), (12, 99, 12), (13, 99, 16), (17, 99, 24), (97, 999, 128), (9, 10, 10)],
)
def test_prompts_are_padded_to_few_lengths(longest: int, slots: int, length: int) -> None:
    assert engine.prompt_length(longest, slots) == length


def test_from_9_tokens_on_at_most_a_third_of_a_prompt_is_padding() -> None:
    lengths = {engine.prompt_length(longest, 4096) for longest in range(9, 4097)}
    assert len(lengths) == 18
    assert all(longest <= engine.prompt_length(longest, 4096) < longest / 2 * 3 for longest in range(9, 4097))


class Recorded(engine.PromptReader):
    """A reader that does on the CPU what it does on a GPU, where a replay computes with what the buffers then hold."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, recorded=True)
        self.shapes: list[tuple[int, ...]] = []

    def run(self, tokens: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        return super().run(tokens)

    def capture(self, length: int) -> Any:
        def replay() -> None:
            self.logits[length] = self.run(self.tokens[length])

        return SimpleNamespace(replay=replay)


@torch.no_grad()
def test_padded_prompts_leave_the_same_logits_and_slots() -> None:
    model = fold(tiny(context=64).float())
    reader = Recorded(model.make_caches(2, 64), partial(read_prompts, model))
    for prompts in ([[1, 2, 3], [4] * 14], [[7] * 15, [3, 1]], [[2] * 13, [5] * 9], [[1] * 40, [2]]):
        caches = model.make_caches(2, 64)
        lengths = torch.tensor([len(p) for p in prompts])
        expected = model.prefill(engine.padded(prompts, max(map(len, prompts))), lengths, caches)
        torch.testing.assert_close(reader(prompts), expected)
        for ours, theirs in zip(reader.caches, caches, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                for row, length in enumerate(lengths):
                    torch.testing.assert_close(a[row, :, :length], b[row, :, :length])
    assert reader.shapes == [(2, 14), (2, 16), (2, 16), (2, 40)]  # the first of a length is not padded


@torch.no_grad()
def test_many_tokens_are_read_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fold(tiny(context=64).float())
    monkeypatch.setattr(tuning, "PROMPT_GRAPH_TOKENS", 31)
    reader = Recorded(model.make_caches(2, 64), partial(read_prompts, model))
    for _ in range(3):
        reader([[1] * 13, [2] * 3])
    assert reader.shapes == [(2, 13)] * 3


def test_a_graph_is_recorded_on_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up, streams and capture, with stand-ins for those of CUDA."""
    current, seen = ["cuda:0"], []

    @contextmanager
    def on(device: object) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def note(what: str, result: object = None) -> Any:
        return lambda *args, **options: seen.append((what, current[-1])) or result

    stream = SimpleNamespace(wait_stream=note("wait"))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "Stream", note("stream", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", note("current", stream))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", note("graph"))
    captured: list[object] = []
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, *, stream, **_: nullcontext(captured.append(stream)))
    engine.record(note("run"), note("warm up"), [], torch.device("cuda:1"))
    assert captured == [stream]  # otherwise PyTorch takes one of the device of its first capture
    assert {what for what, _ in seen} == {"stream", "current", "wait", "graph", "run", "warm up"}
    assert {device for _, device in seen} == {"cuda:1"}


@pytest.mark.parametrize("trained", [False, True])
def test_a_model_is_freed_as_soon_as_nobody_refers_to_it(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a copy that is folded for a call nor a folded model with its engine waits for the garbage collector."""
    made: list[weakref.ref[Folded]] = []

    def folding(model: Decoder) -> Folded:
        folded = fold(model)
        made.append(weakref.ref(folded))
        return folded

    monkeypatch.setattr(module, "fold", folding)
    gc.collect()
    gc.disable()
    try:
        model: Any = byte_model() if trained else folding(byte_model())
        generate(model, [[1]], 3, GREEDY)
        if not trained:
            assert made[0]() is not None
            assert model.engine is not None
            generate(model, [[1]], 3, GREEDY)
            del model
        assert len(made) == 1
        assert made[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "message"),
    [
        ([], 1, "at least one token"), ([[1], []], 1, "at least one token"), ([[1]], 0, "at least one token"),
        ([[260]], 1, "token 260 .* vocabulary of 260"), ([[-1]], 1, "token -1"), (torch.zeros(3), 1, "shape"),
        (torch.zeros(1, 3), 1, "float32"), ([[1] * 65], 1, "65 tokens is longer than the model's context of 64"),
        ([[1] * 60], 6, "at most 5"), ([1, 2], 1, "a list of token ids per row"), ([[1.5]], 1, "token ids"),
        (["text"], 1, "generate_text takes text"),
    ],
)  # fmt: skip
def test_impossible_requests_are_explained(prompts: Sequence[list[int]], new_tokens: int, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        generate(fold(byte_model()), prompts, new_tokens)
    assert "--" not in str(caught.value)  # Python has no command-line options


@pytest.mark.parametrize(
    ("step", "message"), [("kernels", "need a GPU.*step='auto'"), ("kernel", "did you mean kernels")]
)
def test_a_step_that_is_impossible_is_explained(step: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        generate(fold(byte_model()), [[1]], 1, step=step)
    assert "--" not in str(caught.value)


def test_the_context_can_be_filled_to_the_last_token() -> None:
    assert len(generate(byte_model(), [[1] * 60], 5)[0]) == 5
    assert len(generate(byte_model(), [[1] * 64], 1)[0]) == 1


def writes(monkeypatch: pytest.MonkeyPatch, *texts: bytes) -> None:
    """A model that writes these bytes, one row each."""

    def fake(
        model: object, rows: list[list[int]], new_tokens: int, *_: object, watch: module.Watch | None, **__: object
    ) -> list[list[int]]:
        found = []
        for row, text in enumerate(texts):
            made: list[int] = []
            for byte in [*text[:new_tokens]]:
                made.append(END if byte == 0 else byte)
                if (watch is not None and watch(row, made[-1:])) or byte == 0:
                    break
            found.append(made)
        return found

    monkeypatch.setattr(module, "generate", fake)


BYTES = load_tokenizer("bytes")


def test_text_stops_at_the_first_stop_string(monkeypatch: pytest.MonkeyPatch) -> None:
    writes(monkeypatch, b"one two three", b"nothing of it", b"t\0")
    pieces: dict[int, list[str]] = {0: [], 1: [], 2: []}
    found = generate_text(
        None, BYTES, ["a", "b", "c"], 100, end=END, stop=("three", "two"),  # type: ignore[arg-type]
        emit=lambda row, piece: pieces[row].append(piece),
    )  # fmt: skip
    assert [(t.text, t.reason) for t in found] == [("one ", "stop"), ("nothing of it", "length"), ("t", "end")]
    assert ["".join(pieces[row]) for row in range(3)] == ["one ", "nothing of it", "t"]
    assert pieces[1][0] == "n"  # as it comes
    assert "t" not in pieces[0]  # held back: it may begin a stop string
    assert [t.text for t in generate_text(None, BYTES, ["a", "b", "c"], 7, end=END)] == [  # type: ignore[arg-type]
        "one two", "nothing", "t"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text", ["äöü €", "日本語", "a\ud83d\ude42b".encode("utf-16", "surrogatepass").decode("utf-16")]
)
def test_characters_of_several_tokens_come_whole(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    writes(monkeypatch, text.encode())
    pieces: list[str] = []
    found = generate_text(None, BYTES, ["x"], 100, end=END, emit=lambda _, piece: pieces.append(piece))  # type: ignore[arg-type]
    assert "".join(pieces) == found[0].text == text
    assert pieces == list(text)


@pytest.mark.parametrize("every", [1, 16])
def test_tokens_are_counted_up_to_the_stop_string_however_many_are_read(
    monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    rows = {0: b"one two three", 1: b"t\0"}

    def fake(*_: object, watch: module.Watch, **__: object) -> list[list[int]]:
        made: list[list[int]] = []
        for row, text in rows.items():
            tokens = [END if byte == 0 else byte for byte in text]
            made.append(tokens)
            any(watch(row, tokens[start : start + every]) for start in range(0, len(tokens), every))
        return made

    monkeypatch.setattr(module, "generate", fake)
    found = generate_text(None, BYTES, ["a", "b"], 20, end=END, stop=("two",))  # type: ignore[arg-type]
    assert [(t.text, t.tokens, t.reason) for t in found] == [("one ", 7, "stop"), ("t", 2, "end")]


def held_by_hand(text: str, stop: tuple[str, ...]) -> int:
    """Longest end of the text that begins a stop string: every prefix of every string is compared."""
    return max((n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


@given(st.lists(st.text("abc", min_size=1), max_size=4), st.lists(st.text("abc", max_size=12), max_size=8))
def test_what_may_begin_a_stop_string_is_held_back(stop: list[str], pieces: list[str]) -> None:
    writer, text, stopped = Writer(BYTES, [], tuple(stop), END), "", False
    for piece in pieces:
        writer.add(list(piece.encode()))
        for character in "" if stopped else piece:
            text += character
            if places := [text.index(s) for s in stop if s in text]:
                text, stopped = text[: min(places)], True
                break
        assert (writer.text, writer.stopped) == (text, stopped)
        assert writer.returned == len(text) - (0 if stopped else held_by_hand(text, tuple(stop)))


def test_long_stop_strings_are_not_compared_prefix_by_prefix() -> None:
    """Only prefixes that end as the text does are compared."""

    class Counting(str):
        compared = 0

        def endswith(self, *args: Any) -> bool:
            Counting.compared += 1
            return super().endswith(*args)

    assert started(Counting("x" * 50 + "a"), "b" * 1000) == 0
    assert started(Counting("x" * 2000 + "ba"), "b" * 500 + "a" + "b" * 499) == 0
    assert Counting.compared == 1


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    writer = Writer(BYTES, [], (), END)
    made = "".join(writer.add([0xE2]) for _ in range(20)) + writer.add([ord("a")]) + writer.finish()
    assert made == "\ufffd" * 20 + "a"


@given(st.lists(st.sampled_from([b"\x80", b"\xe2", b"\xf0\x9f", "🎉".encode(), "é".encode(), b"a"]), max_size=12))
def test_text_between_bytes_that_are_none_is_whole(parts: list[bytes]) -> None:
    writer = Writer(BYTES, [], (), None)
    made = "".join(writer.add([byte]) for byte in b"".join(parts)) + writer.finish()
    assert made == BYTES.decode(list(b"".join(parts)))


def test_a_decoder_that_strips_the_first_space_is_not_fooled() -> None:
    words = Tokenizer(models.WordLevel({"▁the": 0, "▁cat": 1, "s": 2}, unk_token="s"))
    words.decoder = decoders.Metaspace()
    writer = Writer(words, [], (), None)
    assert [writer.add([t]) for t in (0, 1, 2, 0)] == ["the", " cat", "s", " the"]


def spaced_words() -> Tokenizer:
    """A tokenizer like those of SentencePiece: a space begins each text, and unknown characters are bytes."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257, "a": 258, "é": 259}
    words = Tokenizer(models.BPE(vocab | {"▁a": 260}, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(decoder)
    return words


WORDS = spaced_words()


@given(st.text(st.one_of(st.sampled_from(" aé漢🙂"), st.characters(codec="utf-8", exclude_characters="\ufffd"))))
def test_the_pieces_of_any_text_are_its_text(text: str) -> None:
    for tokenizer in (BYTES, WORDS):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        writer = Writer(tokenizer, [], (), None)
        pieces = [writer.add([token]) for token in ids]
        assert "".join(pieces) + writer.finish() == tokenizer.decode(ids, skip_special_tokens=False)


def test_the_space_between_a_prompt_and_its_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    written = WORDS.encode("é aé", add_special_tokens=False).ids
    monkeypatch.setattr(module, "generate", lambda *_, **__: [written] * 3)
    found = generate_text(None, WORDS, ["a", "a 漢" * 9, ""], 9, end=0)  # type: ignore[arg-type]
    assert [t.text for t in found] == [" é aé", " é aé", "é aé"]


def test_an_empty_prompt_is_the_beginning_of_a_document() -> None:
    model, tokenizer = byte_model(), load_tokenizer("bytes")
    end = end_of_text_id(tokenizer)
    found = generate_text(model, tokenizer, [""], 9, GREEDY, end=end)[0]
    tokens = generate(model, [[end]], 9, GREEDY, end=end)[0]
    assert found.tokens == len(tokens)
    assert found.text == tokenizer.decode([t for t in tokens if t != end])
    with pytest.raises(UserError, match="empty prompt"):
        generate_text(model, tokenizer, [""], 9)
    with pytest.raises(UserError, match="stop string"):
        generate_text(model, tokenizer, ["a"], 9, end=end, stop=("",))


def test_the_weights_of_a_model_are_used_at_the_time_of_the_call() -> None:
    model = build(byte_model().cfg, seed=0)
    first = generate(model, [[1]], 20, sampling=GREEDY)
    model.init_weights(torch.Generator().manual_seed(5))
    assert generate(model, [[1]], 20, sampling=GREEDY) != first


@pytest.mark.parametrize("move", ["bfloat16", "double", "half"])
def test_a_folded_model_changes_its_precision_like_any_module(move: str) -> None:
    model = fold(tiny(context=16).float())
    expected = fold(tiny(context=16).float()).prepare("cpu", getattr(torch, move if move != "half" else "float16"))
    generate(model, [[1]], 2, GREEDY)
    moved = getattr(getattr(model, move)(), move)()
    assert moved is model
    assert torch.equal(model(some_tokens(1, 9)), expected(some_tokens(1, 9)))
    assert generate(model, [[1]], 2, GREEDY) == generate(expected, [[1]], 2, GREEDY)


def test_a_folded_model_that_has_generated_can_be_copied_and_pickled() -> None:
    model = fold(tiny(context=16).float())
    expected = generate(model, [[1]], 5, GREEDY)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.engine is None
        assert generate(other, [[1]], 5, GREEDY) == expected
