"""Numbers of the paper, and the rule by which ours decide whether what it says holds.

The rule is part of the protocol: it was written before the runs that it judges. An effect holds if its 95 % interval
excludes no effect, on the paper's side, and its size is at least `WEAKER` of the paper's."""

import math

from angpt.stats import Interval

HOLDS, WEAK, FAILS = "holds", "holds weaker", "does not hold"
OPEN, NOT_RUN, NOT_HERE = "not told apart", "not run yet", "not testable here"
DIVERGED = "diverged"
"""No verdict, because a run that it needs has diverged."""
WEAKER = 0.5
SMALL = 0.005
"""Changes of the loss that the paper reports and that are smaller count as no effect."""

ABLATION = {
    "gpt+": 2.677,
    "angpt": 2.638,
    "angpt/const-x0.5": 2.647,
    "angpt/const-x2": 2.642,
    "angpt/all-x0.5": 7.935,
    "angpt/all-x2": math.inf,
    "angpt/no-const": 2.667,
    "angpt/no-residual-factor": 2.719,
    "angpt/no-factors": 2.718,
    "angpt/no-lerp": 2.688,
    "angpt, half the tokens": 2.755,
    "angpt, twice the tokens": 2.565,
}
"""Table L.1: validation losses at 0.5B and 10B tokens; infinite: NaN."""
STEPS = {"gpt+": 2.1, "ngpt": 3.0, "ngpt/lerp-factor": 3.0, "ngpt/bounded": 3.4, "angpt": 3.8}
"""Figure 5: per cent by which the loss is lower than that of GPT+ without QK norm."""
RELATED = {"gpt+/no-qk-norm": -2.5, "gpt+/ln-scaling": 0.0, "gpt+/dyt": -6.5, "ngpt": 0.2, "angpt": 1.3}
"""Figure A.1: per cent by which the loss is lower than that of GPT+."""
SPEED_UPS = {"angpt": 1.4, "ngpt": 1.29}
"""Figure 3: mean over budgets, against GPT+."""
STEP_TIMES = {"angpt": 0.0275, "ngpt": 0.096}
"""Table 2: increase of the time per step over GPT+."""
TASKS = {
    "piqa": (0.700, 0.718),
    "arc_easy": (0.561, 0.596),
    "hellaswag": (0.400, 0.413),
    "lambada_openai": (16.726, 14.679),
    "wikitext": (17.621, 16.175),
    "winogrande": (0.554, 0.563),
    "mmlu": (0.243, 0.256),
}
"""Table K.1: GPT+ and anGPT of 1B parameters after 42B tokens; perplexities of lambada_openai and wikitext."""


def judged(ours: Interval | None, theirs: float, none: float = 0.0) -> str:
    """Whether an effect of the paper holds; `none` is the value that means no effect."""
    if ours is None:
        return NOT_RUN
    if ours.low is None or ours.high is None or ours.covers(none):
        return OPEN
    effect = math.copysign(1.0, theirs - none) * (ours.mean - none)
    if effect < 0:
        return FAILS
    return HOLDS if effect >= WEAKER * abs(theirs - none) else WEAK


def bound_judged(ours: Interval, relation: str, theirs: float) -> str:
    """The same for a speed-up that may be only a bound: it is larger (>) or smaller (<) than the mean of `ours`."""
    if relation == "=":
        return judged(ours, theirs, 1.0)
    if relation == "<":
        return FAILS if ours.mean < 1 else OPEN
    return OPEN if ours.mean <= 1 else HOLDS if ours.mean >= 1 + WEAKER * (theirs - 1) else WEAK


def change_judged(ours: Interval | None, theirs: float) -> str:
    """Whether a relative change of the loss holds, or its absence if the paper's is small."""
    if ours is None or abs(theirs) >= SMALL:
        return judged(ours, theirs)
    if ours.low is None or ours.high is None:
        return OPEN
    if max(abs(ours.low), abs(ours.high)) < 2 * SMALL:
        return HOLDS
    return OPEN if ours.covers(theirs) else FAILS
