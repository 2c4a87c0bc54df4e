import re
from pathlib import Path

from angpt.evaluation.tasks import PAPER, TASKS


def test_the_documentation_states_every_metric_and_count() -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    for name in PAPER:
        task = TASKS[name]
        row = re.findall(rf"^\| {task.label} .*$", text, re.MULTILINE)[0]
        cells = [cell.strip() for cell in row.split("|")]
        assert cells[2:4] == [f"`{name}`", f"`{task.metric}`"]
        assert int(cells[4].split()[0].replace(",", "")) == task.samples
    for task in TASKS.values():
        assert f"{task.folder}/" in text
