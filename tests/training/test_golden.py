"""The first 20 losses of a tiny run of each architecture. They change only when the mathematics does.

fp32 sums in another order differ in the 7th digit, which 20 steps of Adam at a high rate amplify. Any change
of a formula moves the losses by far more than the tolerance: removing ν(α) or ν_uz moves the 20th by 3 %.
To record: `python -m tests.training.test_golden`, and say in the commit why they changed.
"""

import json
import tempfile
from pathlib import Path

import pytest

from angpt.training.launch import start
from angpt.training.reporter import Quiet
from angpt.training.run import Run
from tests.training.conftest import small, write_tokens

GOLDEN = Path(__file__).parent / "golden.json"
ARCHITECTURES = ("gpt+", "ngpt", "angpt")


def losses(data, architecture, out):
    start(small(data, architecture, tokens="5120"), out, Quiet())
    return [r["loss"] for r in Run.open(out).records() if r["kind"] == "train"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_first_losses_are_what_they_were(data, tmp_path, architecture):
    found = losses(data, architecture, tmp_path / "run")
    assert len(found) == 20
    assert found == pytest.approx(json.loads(GOLDEN.read_text())[architecture], rel=2e-5)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tokens = write_tokens(Path(folder))
        golden = {name: losses(tokens, name, Path(folder) / name.replace("+", "plus")) for name in ARCHITECTURES}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
