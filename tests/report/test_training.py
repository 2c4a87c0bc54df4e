from angpt.report.training import BINS, grouped
from angpt.training.record import Step


def test_many_steps_are_drawn_in_groups() -> None:
    steps = [Step(i, float(i), float(i % 7)) for i in range(1, 2 * BINS + 2)]
    found = grouped(steps)
    assert len(found) == 2 * BINS // 3 + 1 <= BINS
    assert found[0] == Step(3, 2.0, 3.0)
    assert found[-1] == steps[-1]
    assert grouped(steps[:BINS]) == steps[:BINS]
