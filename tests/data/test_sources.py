import gzip
import json
import lzma
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from angpt.data import sources
from angpt.data.sources import Piece, open_source, with_splits
from angpt.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda raw: bytes(pa.Codec("zstd").compress(raw)),
}
TEXTS = ["first\r\nnaïve 漢字\n", "second <|endoftext|>", "third"]


def parquet(texts, column="text", kind=None) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": range(len(texts)), column: pa.array(texts, kind)}), sink, row_group_size=2)
    return bytes(sink.getvalue())


def documents(*names: str, column: str = "text") -> list[tuple[str, str | None]]:
    """Text and split of each document of a source."""
    found: list[tuple[str, str | None]] = []
    for piece in open_source(names, column, None, None).pieces():
        text = "" if piece.first else found.pop()[0]
        found.append((text + piece.text, piece.split))
    return found


@pytest.mark.parametrize("suffix", COMPRESS)
def test_every_format_with_every_compression(tmp_path, suffix):
    compress = COMPRESS[suffix]
    lines = "".join(json.dumps({"text": text, "other": 1}) + "\n" for text in TEXTS) + "\n"
    for name, raw in {
        "a.txt": TEXTS[0].encode(),
        "b.md": TEXTS[1].encode(),
        "c.py": TEXTS[2].encode(),
        "d.jsonl": lines.encode(),
        "e.parquet": parquet(TEXTS),
        "f.parquet": parquet(TEXTS, kind=pa.large_string()),
    }.items():
        (tmp_path / (name + suffix)).write_bytes(compress(raw))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    with pytest.warns(UserWarning, match=r"1 file of unknown kind is left out; known: \.txt"):
        assert [text for text, _ in documents(str(tmp_path))] == TEXTS * 4
    one = str(tmp_path / f"d.jsonl{suffix}")
    assert [text for text, _ in documents(one)] == TEXTS


def test_files_beside_those_of_the_splits_are_named(tmp_path):
    for name in ("train.txt", "val.txt", "extra.txt"):
        (tmp_path / name).write_text(name)
    for paths in ([tmp_path], sorted(tmp_path.iterdir())):
        with pytest.warns(UserWarning, match=r"extra.txt: left out, because the names of other files say"):
            assert [text for text, _ in documents(*map(str, paths))] == ["train.txt", "val.txt"]


def test_folders_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b/z.txt", "a.txt", "b/a.txt", "c.txt", "B.txt", ".venv/x.txt", "b/._z.txt"):  # hidden files are not
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [text for text, _ in documents(str(tmp_path))] == ["B.txt", "a.txt", "b/a.txt", "b/z.txt", "c.txt"]
    both = documents(str(tmp_path / "c.txt"), str(tmp_path / "b"))
    assert [text for text, _ in both] == ["c.txt", "b/a.txt", "b/z.txt"]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("train.txt", "val.txt"),
        ("train.jsonl.xz", "validation.jsonl.xz"),
        ("train-00000-of-00001.parquet", "valid_0.parquet"),
        ("train/x.txt", "val/y.md"),
    ],
)
def test_a_folder_with_splits_of_its_own(tmp_path, train, val):
    for name in (train, val, "README.md", "test.txt", "training-notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        text = f"of {name}"
        raw = json.dumps({"text": text}).encode() if ".jsonl" in name else text.encode()
        raw = parquet([text]) if name.endswith(".parquet") else raw
        path.write_bytes(lzma.compress(raw) if name.endswith(".xz") else raw)
    with pytest.warns(UserWarning, match=r"README.md and 2 more: left out"):
        assert documents(str(tmp_path)) == [(f"of {train}", "train"), (f"of {val}", "val")]


def test_train_alone_is_no_split(tmp_path):
    (tmp_path / "train.txt").write_text("x")
    (tmp_path / "README.md").write_text("y")
    assert documents(str(tmp_path)) == [("y", None), ("x", None)]


def test_invalid_utf8_is_replaced_and_marked(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n{"text": "\\ud83d\\ude42 \\ud83d"}\n{"text": "\\ud83d\\ude42"}\n'
    )
    (tmp_path / "c.parquet").write_bytes(parquet([b"caf\xe9", b"ok"], kind=pa.binary()))
    (tmp_path / "d.txt").write_text("a real \ufffd")
    pieces = list(open_source((str(tmp_path),), "text", None, None).pieces())
    assert [piece.text for piece in pieces] == ["caf�", "caf�", "🙂 �", "🙂", "caf�", "ok", "a real �"]
    assert [piece.replaced for piece in pieces] == [True, True, True, False, True, False, False]


BROKEN = {
    "cut JSON": ("a.jsonl", b'{"text": "x"}\n{"text"', r"a.jsonl, line 2: not valid JSON"),
    "other column": (
        "a.jsonl",
        b'{"txt": "x"}\n',
        r"a.jsonl, line 1: has no column 'text' \(--column\): did you mean txt\?",
    ),
    "no object": ("a.jsonl", b'["x"]\n', r"a.jsonl, line 1: has no column 'text'"),
    "no text": ("a.jsonl", b'{"text": "x"}\n\n{"text": 3}\n', r"a.jsonl, line 3: column 'text' holds int, not text"),
    "parquet: other column": (
        "a.parquet",
        parquet(["x"], "content"),
        r"a.parquet: has no column 'text' \(--column\): did you mean content",
    ),
    "parquet: numbers": ("a.parquet", parquet([1]), r"a.parquet: cannot be read as text"),
    "parquet: null": ("a.parquet", parquet(["x", None]), r"a.parquet, row 2: column 'text' is null"),
    "parquet: nonsense": ("a.parquet", b"nonsense", r"a.parquet: cannot be read"),
    "gz: cut": ("a.txt.gz", gzip.compress(b"x" * 10000)[:-9], r"a.txt.gz: cannot be read"),
    "gz: nonsense": ("a.txt.gz", b"nonsense", r"a.txt.gz: cannot be read"),
    "xz: cut": ("a.txt.xz", lzma.compress(b"x" * 10000)[:-9], r"a.txt.xz: cannot be read"),
    "xz: nonsense": ("a.txt.xz", b"nonsense", r"a.txt.xz: cannot be read"),
    "zst: cut": ("a.txt.zst", COMPRESS[".zst"](b"x" * 10000)[:-3], r"a.txt.zst: cannot be read"),
    "zst: nonsense": ("a.txt.zst", b"nonsense", r"a.txt.zst: cannot be read"),
}


@pytest.mark.parametrize(("name", "raw", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_files_are_named(tmp_path, name, raw, message):
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(UserError, match=message):
        documents(str(path))


def test_what_is_no_source(tmp_path):
    for names, message in {
        (str(tmp_path / "nowhere"),): "nowhere: no such file or folder",
        (str(tmp_path),): "no text files here",
        ("",): "give stdlib, one hf:NAME, or any number of files",
        ("stdlib", "x.txt"): "give stdlib, one hf:NAME, or any number of files",
        (): "give stdlib",
    }.items():
        with pytest.raises(UserError, match=message):
            open_source(names, "text", None, None)
    (tmp_path / "x.docx").write_bytes(b"")
    with pytest.raises(UserError, match=r"x.docx: unknown kind of file"):
        open_source((str(tmp_path / "x.docx"),), "text", None, None)
    with pytest.raises(UserError, match="need a source hf:NAME"):
        open_source(("stdlib",), "text", None, "train")


@pytest.mark.parametrize("package", ["pyarrow", "datasets"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(["x"]))
    with pytest.raises(UserError, match=rf"needs the package {package}; install it with: pip install 'angpt\[data\]'"):
        documents(str(path) if package == "pyarrow" else "hf:some/set")


@given(st.text(st.sampled_from("ab \n漢🙂"), max_size=200))
def test_pieces_are_the_text(text):
    before, sources.PIECE_BYTES = sources.PIECE_BYTES, 16
    try:
        pieces = list(sources._cut(text, False, None))
    finally:
        sources.PIECE_BYTES = before
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert not any(piece.replaced for piece in pieces)


def test_a_cut_is_before_white_space(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    (tmp_path / "a.txt").write_text("some words,  and\n\n  more of them " * 20)
    pieces = [piece.text for piece in open_source((str(tmp_path),), "text", None, None).pieces()]
    assert len(pieces) > 10
    assert all(piece[0].isspace() for piece in pieces[1:])
    assert not any(piece[-1].isspace() for piece in pieces[:-1])


def test_the_standard_library():
    source = open_source(("stdlib",), "text", None, None)
    names = [entry.name for entry in source.entries]
    assert names == sorted(names)
    assert {"json/decoder.py", "argparse.py"} <= set(names)
    assert not any(
        {"test", "tests", "site-packages", "idle_test", "__pycache__"} & set(Path(name).parts) for name in names
    )
    assert source.digest == open_source(("stdlib",), "text", None, None).digest


def test_the_digest_sees_a_change_of_files(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    before = open_source((str(tmp_path),), "text", None, None).digest
    (tmp_path / "a.txt").write_text("xy")
    assert open_source((str(tmp_path),), "text", None, None).digest != before


def whole(count, split=None):
    return (Piece(str(i), True, True, False, split) for i in range(count))


def test_sampled_splits():
    n, fraction = 20_000, 0.05
    chosen = [split for split, _ in with_splits(whole(n), fraction, seed=0)]
    assert abs(chosen.count("val") / n - fraction) < 4 * (fraction / n) ** 0.5
    assert chosen[:1000] == [split for split, _ in with_splits(whole(1000), fraction, seed=0)]
    assert chosen != [split for split, _ in with_splits(whole(n), fraction, seed=1)]
    assert [split for split, _ in with_splits(whole(2), 1e-9, 0)] == ["val", "train"]
    assert {split for split, _ in with_splits(whole(50, "train"), 0.5, 0)} == {"train"}


def test_pieces_of_a_document_stay_together_and_empty_documents_are_left_out():
    pieces = [
        piece
        for i in range(500)
        for piece in (
            Piece("", True, True, False, None),
            Piece(f"{i} a", True, False, False, None),
            Piece(f"{i} b", False, True, False, None),
        )
    ]
    found = list(with_splits(pieces, 0.3, 0))
    assert len(found) == 1000
    assert all(a[0] == b[0] for a, b in zip(found[::2], found[1::2], strict=True))
    expected = [split for split, _ in with_splits(whole(500), 0.3, 0)]
    assert [split for split, _ in found[::2]] == expected


class TestHub:
    @pytest.fixture
    def hub(self, tmp_path, monkeypatch):
        """The hub's `load_dataset`, reading local parquet files in place of a download."""
        datasets = pytest.importorskip("datasets")
        real = datasets.load_dataset
        files = {}
        for split, texts in {"train": TEXTS, "validation": ["held out"], "test": ["tested"]}.items():
            files[split] = str(tmp_path / f"{split}.parquet")
            Path(files[split]).write_bytes(parquet(texts))

        def load_dataset(name, config, *, split, streaming):
            assert (name, config, streaming) == ("some/set", "small", True)
            return real("parquet", data_files=files, split=split, streaming=True, cache_dir=str(tmp_path / "cache"))

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return files

    def read(self, hub_split=None, column="text"):
        source = open_source(("hf:some/set",), column, "small", hub_split)
        return [(piece.text, piece.split) for piece in source.pieces()]

    def test_its_own_validation_split(self, hub):
        assert self.read() == [(text, "train") for text in TEXTS] + [("held out", "val")]

    def test_a_chosen_split(self, hub):
        assert self.read("test") == [("tested", None)]

    def test_without_validation(self, hub):
        del hub["validation"]
        assert self.read() == [(text, None) for text in TEXTS]
        del hub["train"]
        with pytest.raises(UserError, match="has no split train; choose one of test with --hub-split"):
            self.read()

    def test_errors(self, hub):
        with pytest.raises(UserError, match=r"hf:some/set, row 0: has no column 'txt' \(--column\): did you mean text"):
            self.read(column="txt")
        with pytest.raises(UserError, match="hf:some/set: cannot be loaded"):
            self.read("nope")
        Path(hub["train"]).write_bytes(b"broken on the way")
        with pytest.raises(UserError, match=r"hf:some/set: (broke off|cannot be loaded)"):
            self.read()
