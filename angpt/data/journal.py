"""What is done of a prepared folder that is not complete: its recipe, then a line for each finished shard."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from angpt.config import from_dict
from angpt.data.shards import INDEX, SPLITS, Index, Recipe, Shard, SplitName
from angpt.errors import UserError

# Not .jsonl: the folder may be inside of a source, where it would be read as text.
JOURNAL = "journal.log"

CHANGED = {
    "source_digest": "the files of the source have changed since it was prepared",
    "tokenizer_fingerprint": "the tokenizer is not the one that it was prepared with",
}


@dataclass(frozen=True)
class Journal:
    """The finished shards of a folder, kept on disk as they are finished."""

    path: Path
    shards: dict[SplitName, list[Shard]]

    @classmethod
    def begin(cls, folder: Path, recipe: Recipe) -> "Journal":
        """Go on where a run with the same recipe stopped, or start in a folder that is new or empty."""
        path = folder / JOURNAL
        lines = _complete_lines(path)
        journal = cls(path, {split: [] for split in SPLITS})
        if not lines:
            if folder.is_file() or (folder.exists() and any(file != path for file in folder.iterdir())):
                raise UserError(f"{folder}: is not empty and holds no prepared data; choose another --out")
            folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            journal._append(dataclasses.asdict(recipe))
            return journal
        check_recipe(folder, from_dict(Recipe, json.loads(lines[0])), recipe)
        path.write_text("".join(lines), encoding="utf-8")  # without the line that was being written
        for line in map(json.loads, lines[1:]):
            journal.shards[line["split"]].append(from_dict(Shard, line["shard"]))
        return journal

    def add(self, split: SplitName, shard: Shard) -> None:
        self.shards[split].append(shard)
        self._append({"split": split, "shard": dataclasses.asdict(shard)})

    def remove(self) -> None:
        self.path.unlink()

    def _append(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
            file.flush()
            os.fsync(file.fileno())


def complete_index(folder: Path, recipe: Recipe) -> Index | None:
    """The index of a folder that is complete, which must have the same recipe; None if there is work to do."""
    if not (folder / INDEX).exists():
        return None
    index = Index.read(folder)
    check_recipe(folder, index.recipe, recipe)
    (folder / JOURNAL).unlink(missing_ok=True)
    return index


def check_recipe(folder: Path, there: Recipe, wanted: Recipe) -> None:
    for field in dataclasses.fields(Recipe):
        old, new = getattr(there, field.name), getattr(wanted, field.name)
        if old != new:
            what = CHANGED.get(field.name, f"was prepared with {field.name} = {old!r}, not {new!r}")
            raise UserError(f"{folder}: {what}; choose another --out or delete it")


def _complete_lines(path: Path) -> list[str]:
    """All lines that end: a run that is killed may leave a part of one."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
