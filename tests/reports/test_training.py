from angpt.reports.training import BINS, grouped
from angpt.training.record import TrainStep


def made(tokens: int, loss: float, grad_norm: float) -> TrainStep:
    return TrainStep(tokens, tokens, loss, 0.1, grad_norm, 1.0, 0.5, 1.0)


def test_many_steps_are_drawn_in_groups() -> None:
    steps = [made(i, float(i), float(i % 7)) for i in range(1, 2 * BINS + 2)]
    found = grouped(steps)
    assert len(found) == 2 * BINS // 3 + 1 <= BINS
    assert found[0] == made(3, 2.0, 3.0)
    assert found[-1] == steps[-1]
    assert grouped(steps[:BINS]) == steps[:BINS]
