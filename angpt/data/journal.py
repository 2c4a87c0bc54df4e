"""The journal of an unfinished folder: its recipe, then a line for each finished shard."""

import dataclasses
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angpt.data.shards import INDEX, SPLITS, Index, Recipe, Shard, SplitName
from angpt.errors import UserError
from angpt.serialization import from_dict, parse_json
from angpt.system import LOCK, check_characters, locked, write_atomically

# Not .jsonl: if the folder is inside a source, that would be read as text.
JOURNAL = "journal.log"

CHANGED = {
    "source_digest": "the files of the source have changed since it was prepared",
    "tokenizer_fingerprint": "was prepared with another tokenizer",
}


@dataclass(frozen=True)
class Finished:
    """A line of the journal: a finished shard."""

    split: SplitName
    shard: Shard


@dataclass(frozen=True)
class Journal:
    """The finished shards of a folder; each is recorded on disk at once."""

    path: Path
    shards: dict[SplitName, list[Shard]]

    @classmethod
    def begin(cls, folder: Path, recipe: Recipe) -> "Journal":
        """Continue an interrupted run with the same recipe, or start one."""
        path = folder / JOURNAL
        lines = _complete_lines(path)
        journal = cls(path, {split: [] for split in SPLITS})
        if not lines:
            path.unlink(missing_ok=True)
            journal._append(dataclasses.asdict(recipe))
            return journal
        try:
            there = from_dict(Recipe, parse_json(lines[0]), finite=True)
            finished = [from_dict(Finished, parse_json(line)) for line in lines[1:]]
        except UserError as error:
            raise UserError(f"{path}: cannot be read ({error}); delete {folder} and prepare it again") from error
        check_recipe(folder, there, recipe)
        write_atomically(path, "".join(lines))  # drops an incomplete last line
        for entry in finished:
            journal.shards[entry.split].append(entry.shard)
        return journal

    def add(self, split: SplitName, shard: Shard) -> None:
        self.shards[split].append(shard)
        self._append(dataclasses.asdict(Finished(split, shard)))

    def _append(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
            file.flush()
            os.fsync(file.fileno())


def lock(folder: Path) -> AbstractContextManager[None]:
    """The lock of a folder, held in a `with` block; the folder is made, or must be empty or an unfinished one."""
    ours = (folder / INDEX).exists() or _complete_lines(folder / JOURNAL)
    if folder.exists() and not ours and (folder.is_file() or {p.name for p in folder.iterdir()} - {JOURNAL, LOCK}):
        raise UserError(f"{folder}: is not empty and holds no prepared data; choose another --out")
    check_characters(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return locked(folder / LOCK, "another process prepares this folder")


def complete_index(folder: Path, recipe: Recipe) -> Index | None:
    """The index of a complete folder, which must have the same recipe; None if the folder is not complete."""
    if not (folder / INDEX).exists():
        return None
    index = Index.read(folder)
    check_recipe(folder, index.recipe, recipe)
    (folder / JOURNAL).unlink(missing_ok=True)
    return index


def check_recipe(folder: Path, there: Recipe, wanted: Recipe) -> None:
    """Raise an error that names the first difference between two recipes."""
    for field in dataclasses.fields(Recipe):
        old, new = getattr(there, field.name), getattr(wanted, field.name)
        if old != new:
            what = CHANGED.get(field.name, f"was prepared with {field.name} = {old!r}, not {new!r}")
            raise UserError(f"{folder}: {what}; choose another --out or delete it")


def _complete_lines(path: Path) -> list[str]:
    """The lines of a file without an incomplete last one, which a killed run may leave; none if there is no file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [f"{line}\n" for line in text.split("\n")[:-1]]
