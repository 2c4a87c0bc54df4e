import errno
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models

from angpt.data import prepare as prepare_module
from angpt.data.journal import JOURNAL, Journal
from angpt.data.shards import TOKENIZER, Index, ShardWriter, TokenData
from angpt.data.tokenizers import load_tokenizer
from angpt.errors import UserError
from angpt.present.terminal import terminal
from angpt.system import LOCK
from tests.data.corpora import NEOX, REAL, folder_bytes, prepare, write_jsonl

ROOT = Path(__file__).parents[2]
OPTIONS = {"tokenizer": "bytes", "shard_bytes": 20_000, "val_fraction": 0.1}
needs_corpus = pytest.mark.skipif(not NEOX.exists(), reason=f"no corpus at {REAL} (set ANGPT_CORPUS)")


def quiet() -> Console:
    return terminal(file=io.StringIO())


@pytest.fixture
def corpus(tmp_path):
    return (str(write_jsonl(tmp_path / "x.jsonl", 2000)),)


@pytest.fixture
def undisturbed(corpus, tmp_path):
    prepare(corpus, tmp_path / "undisturbed", console=quiet(), **OPTIONS)
    return folder_bytes(tmp_path / "undisturbed")


def test_what_is_written_is_the_text(corpus, tmp_path):
    index = prepare(corpus, tmp_path / "out", console=quiet(), **OPTIONS)
    assert index == Index.read(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    texts = [json.loads(line)["text"] for line in Path(corpus[0]).read_text().splitlines()]
    found: list[str] = []
    for split in ("train", "val"):
        data = TokenData.open(tmp_path / "out", split)
        stream = bytes(0 if t == 256 else t for t in data.read(0, data.tokens).tolist()).decode()
        documents = stream.split("\0")
        assert documents.pop() == ""
        assert len(documents) == getattr(index, split).documents
        assert getattr(index, split).text_bytes == sum(len(d.encode()) for d in documents)
        order = [texts.index(document) for document in documents]
        assert order == sorted(order)
        found += documents
    assert sorted(found) == sorted(texts)
    assert 100 < index.val.documents < 300
    # A shard ends with the document that fills it.
    for shard in index.train.shards[:-1]:
        assert 20_000 <= shard.text_bytes < 20_000 + max(len(text.encode()) for text in texts)
    assert tokenizer.token_to_id("<|endoftext|>") == index.eot


def test_the_number_of_workers_changes_nothing(corpus, tmp_path, undisturbed, monkeypatch):
    monkeypatch.setattr(prepare_module, "CHUNK_BYTES", 3000)
    for workers in (1, 2, 5):
        prepare(corpus, tmp_path / str(workers), workers=workers, console=quiet(), **OPTIONS)
        assert folder_bytes(tmp_path / str(workers)) == undisturbed


def test_killed_and_run_again(corpus, tmp_path, undisturbed):
    out = tmp_path / "out"
    process = slow_prepare(corpus, out)
    try:
        wait_for_lines(out / JOURNAL, 4)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert not (out / "index.json").exists()
    with pytest.raises(UserError, match="run it again if it was interrupted"):
        TokenData.open(out, "train")
    finished = [json.loads(line)["shard"]["file"] for line in (out / JOURNAL).read_text().splitlines()[1:]]
    assert len(finished) >= 3
    before = {name: (out / name).stat().st_mtime_ns for name in finished}
    prepare(corpus, out, console=quiet(), **OPTIONS)
    assert folder_bytes(out) == undisturbed
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == before


def slow_prepare(corpus, out):
    """A process that prepares a folder in small pieces."""
    script = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from angpt.data import prepare as module
        module.CHUNK_BYTES = 3000
        write = module.ShardWriter.write
        def slow(*args):
            time.sleep(0.01)
            write(*args)
        module.ShardWriter.write = slow
        from tests.data.corpora import prepare
        prepare({corpus!r}, Path({str(out)!r}), **{OPTIONS!r})
    """)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, cwd=ROOT)


def test_two_at_once_do_not_disturb_each_other(corpus, tmp_path, undisturbed):
    """The second says which process is there and changes nothing; when that one is killed, it can go on."""
    out = tmp_path / "out"
    with slow_prepare(corpus, out) as process:
        wait_for_lines(out / JOURNAL, 2)
        for _ in range(5):
            with pytest.raises(UserError, match=rf"another process prepares this folder \(process {process.pid} on"):
                prepare(corpus, out, console=quiet(), **OPTIONS)
        wait_for_lines(out / JOURNAL, 4)
        process.kill()
    prepare(corpus, out, console=quiet(), **OPTIONS)
    assert folder_bytes(out) == undisturbed


def wait_for_lines(path: Path, count: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if path.exists() and path.read_text().count("\n") >= count:
            return
        time.sleep(0.005)
    raise AssertionError(f"{path} never had {count} lines")


class Crash(Exception):
    pass


@pytest.mark.parametrize("where", [(ShardWriter, "write"), (ShardWriter, "finish"), (Journal, "add"), (Index, "write")])
@pytest.mark.parametrize("after", [False, True])
def test_every_moment_is_one_to_go_on_from(corpus, tmp_path, undisturbed, monkeypatch, where, after):
    """Stop before or after each kind of write, again and again, until the folder is complete."""
    owner, name = where
    original = getattr(owner, name)
    calls = {"left": 0}

    def crash(*args):
        if calls["left"] == 0 and not after:
            raise Crash
        result = original(*args)
        if calls["left"] == 0:
            raise Crash
        calls["left"] -= 1
        return result

    monkeypatch.setattr(owner, name, crash)
    out = tmp_path / "out"
    for attempt in range(4):
        calls["left"] = 2 * attempt
        try:
            prepare(corpus, out, console=quiet(), **OPTIONS)
        except Crash:
            continue
    monkeypatch.undo()
    prepare(corpus, out, console=quiet(), **OPTIONS)
    assert folder_bytes(out) == undisturbed


def test_a_torn_journal_line_is_dropped(corpus, tmp_path, undisturbed, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(Index, "write", lambda *_: (_ for _ in ()).throw(Crash))
    with pytest.raises(Crash):
        prepare(corpus, out, console=quiet(), **OPTIONS)
    monkeypatch.undo()
    whole = (out / JOURNAL).read_text()
    for text in (whole[:-20], whole[:50], ""):
        (out / JOURNAL).write_text(text)
        if len(text) <= 50:
            for path in out.iterdir():
                if path.name != JOURNAL:
                    path.unlink()
        prepare(corpus, out, console=quiet(), **OPTIONS)
        assert folder_bytes(out) == undisturbed
        (out / "index.json").unlink()


def test_a_full_disk_leaves_no_part_of_a_shard(corpus, tmp_path, monkeypatch):
    def full(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ShardWriter, "finish", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(corpus, tmp_path / "out", **OPTIONS)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [LOCK, JOURNAL, TOKENIZER]
    (tmp_path / "out" / f".{TOKENIZER}.0123456789abcdef.part").write_text("left by a killed process")
    monkeypatch.undo()
    prepare(corpus, tmp_path / "out", **OPTIONS)
    assert not list((tmp_path / "out").glob(".*.part"))


def test_finished_shards_must_still_be_there(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(Index, "write", lambda *_: (_ for _ in ()).throw(Crash))
    with pytest.raises(Crash):
        prepare(corpus, out, console=quiet(), **OPTIONS)
    monkeypatch.undo()
    (out / "train-00001.bin").unlink()
    with pytest.raises(UserError, match=r"train-00001.bin: the shard is missing"):
        prepare(corpus, out, console=quiet(), **OPTIONS)


def test_interrupt_says_how_to_go_on(corpus, tmp_path, undisturbed, monkeypatch):
    console = quiet()
    monkeypatch.setattr(Journal, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "out", console=console, **OPTIONS)
    assert "run the same command again to continue" in console.file.getvalue()
    monkeypatch.undo()
    prepare(corpus, tmp_path / "out", console=quiet(), **OPTIONS)
    assert folder_bytes(tmp_path / "out") == undisturbed


def test_a_complete_folder_is_left_alone(corpus, tmp_path):
    out, console = tmp_path / "out", quiet()
    first = prepare(corpus, out, console=quiet(), **OPTIONS)
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(corpus, out, console=console, **OPTIONS) == first
    assert "is complete already" in console.file.getvalue()
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "was prepared with seed = 0, not 1; choose another --out or delete it"),
        ({"val_fraction": 0.2}, "was prepared with val_fraction = 0.1, not 0.2"),
        ({"tokenizer": "bpe:300"}, "was prepared with tokenizer = 'bytes', not 'bpe:300'"),
        ({"shard_bytes": 5}, "was prepared with shard_bytes = 20000, not 5"),
    ],
)
def test_other_arguments_are_an_error(corpus, tmp_path, monkeypatch, complete, change, message):
    out = tmp_path / "out"
    if complete:
        prepare(corpus, out, console=quiet(), **OPTIONS)
    else:
        monkeypatch.setattr(Journal, "add", lambda *_: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            prepare(corpus, out, console=quiet(), **OPTIONS)
    before = folder_bytes(out)
    with pytest.raises(UserError, match=message):
        prepare(corpus, out, console=quiet(), **{**OPTIONS, **change})
    assert folder_bytes(out) == before


def test_a_changed_source_or_tokenizer_is_an_error(corpus, tmp_path):
    options = OPTIONS | {"tokenizer": str(tmp_path / "t.json")}
    load_tokenizer("bytes").save(options["tokenizer"])
    prepare(corpus, tmp_path / "out", console=quiet(), **options)
    load_tokenizer("bpe:300").save(options["tokenizer"])
    with pytest.raises(UserError, match="was prepared with another tokenizer"):
        prepare(corpus, tmp_path / "out", console=quiet(), **options)
    load_tokenizer("bytes").save(options["tokenizer"])
    write_jsonl(Path(corpus[0]), 1999)
    with pytest.raises(UserError, match="the files of the source have changed"):
        prepare(corpus, tmp_path / "out", console=quiet(), **options)


def test_a_foreign_folder_is_not_touched(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.bin").write_bytes(b"precious")
    with pytest.raises(UserError, match="is not empty and holds no prepared data; choose another --out"):
        prepare(corpus, out, console=quiet(), **OPTIONS)
    assert folder_bytes(out) == {"train.bin": b"precious"}


@pytest.mark.parametrize("size", [2, 1_000, 700_001])  # the last has several pieces
@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5])
def test_the_end_of_a_document_that_is_alone_is_val(tmp_path, size, fraction):
    text = "".join(chr(ord("a") + i * i % 26) for i in range(size))
    (tmp_path / "book.txt").write_text(text)
    (tmp_path / "empty.txt").write_text("")
    out, names = tmp_path / "out", (str(tmp_path / "book.txt"), str(tmp_path / "empty.txt"))
    index = prepare(names, out, tokenizer="bytes", val_fraction=fraction, console=quiet())
    border = min(max(1, round((1 - fraction) * size)), size - 1)
    assert (index.train.documents, index.val.documents) == (1, 1)
    for split, expected in (("train", text[:border]), ("val", text[border:])):
        data = TokenData.open(out, split)
        assert data.read(0, data.tokens).tolist() == [*expected.encode(), 256]


def test_too_little_text(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for text, message in (("", "no text at all"), ("1", "one character cannot be split into train and val")):
        (source / "a.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            prepare((str(source),), tmp_path / "out", tokenizer="bytes", console=quiet())
        assert not (tmp_path / "out").exists()
    (source / "b.txt").write_text("two")
    index = prepare((str(source),), tmp_path / "out", tokenizer="bytes", console=quiet())
    assert (index.train.documents, index.val.documents) == (1, 1)
    (source / "a.txt").rename(source / "train.txt")
    (source / "b.txt").rename(source / "val.txt")
    (source / "val.txt").write_text("")
    with pytest.raises(UserError, match="the source has no text for val"):
        prepare((str(source),), tmp_path / "other", tokenizer="bytes", console=quiet())
    with pytest.raises(UserError, match="val_fraction must be between 0 and 1"):
        prepare((str(source),), tmp_path / "x", tokenizer="bytes", val_fraction=0.0, console=quiet())


def test_invalid_utf8_is_counted(tmp_path):
    for name, raw in {"a": b"fine", "b": b"caf\xe9", "c": b"\xff", "d": "é".encode()}.items():
        (tmp_path / f"{name}.txt").write_bytes(raw)
    index = prepare((str(tmp_path),), tmp_path / "out", tokenizer="bytes", console=quiet())
    assert index.train.replaced + index.val.replaced == 2


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path, corpus):
    tokenizer = load_tokenizer("bytes")
    tokenizer.add_tokens([f"never{i}" for i in range(70_000)])
    tokenizer.add_tokens(["tree"])
    tokenizer.save(str(tmp_path / "large.json"))
    index = prepare(corpus, tmp_path / "out", console=quiet(), **OPTIONS | {"tokenizer": str(tmp_path / "large.json")})
    assert (index.dtype, index.vocab_size, index.train.max_token) == ("uint32", 70_258, 70_257)
    data = TokenData.open(tmp_path / "out", "train")
    assert load_tokenizer(tmp_path / "out").decode(data.read(0, 30).tolist()).strip()
    assert int(data.read(0, data.tokens).max()) == data.max_token == 70_257


def test_a_document_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("angpt.data.sources.PIECE_BYTES", 500)
    text = "\n\n".join(f"Sentence number {i}, with  spaces\tand naïve words.  " for i in range(300))
    (tmp_path / "a.txt").write_text("held out")
    (tmp_path / "b.txt").write_text(text)
    prepare((str(tmp_path),), tmp_path / "out", tokenizer="bpe:400", console=quiet())
    data = TokenData.open(tmp_path / "out", "train")
    expected = load_tokenizer(tmp_path / "out").encode(text).ids
    assert data.read(0, data.tokens).tolist() == [*expected, data.eot]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (models.BPE(), "the tokenizer has no vocabulary"),
        (models.WordLevel({"a": 0}, unk_token="a"), "the tokenizer has no end-of-text token"),
        (models.WordLevel({"</s>": 0}), "the tokenizer cannot encode every text"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_leaves_no_folder(corpus, tmp_path, model, message):
    Tokenizer(model).save(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match=message):
        prepare(corpus, tmp_path / "out", tokenizer=str(tmp_path / "t.json"), console=quiet())
    assert not (tmp_path / "out").exists()


def test_a_folder_has_no_line_break_in_its_name(corpus, tmp_path):
    with pytest.raises(UserError, match="has control characters in its name"):
        prepare(corpus, tmp_path / "a\nb", **OPTIONS)


def test_progress_on_a_terminal_and_elsewhere(corpus, tmp_path):
    for live in (True, False):
        console = Console(file=io.StringIO(), force_terminal=live, width=120)
        prepare(corpus, tmp_path / str(live), console=console, **OPTIONS)
        assert "2,000 documents" in console.file.getvalue()
        assert "tokens/s" in console.file.getvalue()


@needs_corpus
def test_real_text_has_the_known_number_of_tokens(tmp_path):
    index = prepare((str(REAL / "val.jsonl.xz"),), tmp_path / "out", tokenizer=str(NEOX), console=quiet())
    assert index.train.tokens + index.val.tokens == 878_982
    assert index.train.text_bytes + index.val.text_bytes == 3_640_005
    assert index.train.documents + index.val.documents == 731


@pytest.mark.slow
@pytest.mark.long
@needs_corpus
def test_real_corpus_has_the_known_number_of_tokens(tmp_path):
    files = str(REAL / "train.jsonl.xz"), str(REAL / "val.jsonl.xz")
    index = prepare(files, tmp_path / "out", tokenizer=str(NEOX), console=quiet())
    assert (index.train.tokens, index.train.documents, index.train.text_bytes) == (40_933_012, 36_087, 168_653_681)
    assert (index.val.tokens, index.val.documents, index.val.text_bytes) == (878_982, 731, 3_640_005)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its peak of memory from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """5 GB, half of it in one plain text file, half in rows; ANGPT_CORPUS_GB for another size."""
    size = float(os.environ.get("ANGPT_CORPUS_GB", "5")) * 1e9
    source = tmp_path / "source"
    source.mkdir()
    row = Path(write_jsonl(tmp_path / "rows.jsonl", 1000, words=200)).read_bytes()
    block = "\n".join(json.loads(line)["text"] for line in row.splitlines()).encode()
    with gzip.open(source / "a.jsonl.gz", "wb", 1) as rows, gzip.open(source / "b.txt.gz", "wb", 1) as text:
        for _ in range(int(size / 2 / len(block))):
            rows.write(row)
            text.write(block)
    script = textwrap.dedent(f"""
        import re
        from pathlib import Path
        from tests.data.corpora import prepare
        index = prepare(({str(source)!r},), Path({str(tmp_path / "out")!r}), tokenizer="bpe:4096")
        print(index.train.text_bytes + index.val.text_bytes)
        # Not getrusage, which begins with the peak of the process that started this one.
        print(int(re.search("VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
    """)
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    text_bytes, peak = map(int, done.stdout.splitlines()[-2:])
    assert text_bytes > 0.98 * size
    assert peak < 1 << 30
