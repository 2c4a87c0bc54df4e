"""Numbers of the paper for comparison: 0.5B models, trained on 10B tokens."""

RATIOS: dict[str, dict[str, float]] = {
    "first attention": {"gpt+": 0.01, "angpt": 1.07},
    "first MLP": {"gpt+": 1.60, "angpt": 1.86},
    "middle attention": {"gpt+": 2.47, "angpt": 0.86},
    "middle MLP": {"gpt+": 2.60, "angpt": 0.97},
    "last attention": {"gpt+": 4.62, "angpt": 0.92},
    "last MLP": {"gpt+": 5.83, "angpt": 1.22},
}
"""Mean output norm over mean input norm of the blocks."""

FACTOR_ERRORS = {"ν_qkv": 1.16, "ν_p": 0.07, "ν_uz": 0.02, "ν_d": 0.08, "ν_acf": 0.41, "ν(α)": 0.00}
"""Estimation error of the factors in per cent."""

ALPHA = (0.12, 0.25)
"""Range of α at the end of training; it starts at 0.05."""

ROBUSTNESS = {
    "gpt+": {"text": (1831.42, 353.93), "same token": (545.68, 78.80)},
    "angpt": {"text": (2.48, 0.18), "same token": (1.65, 0.15)},
}
"""Mean and standard deviation of the residual norm on text and on 512 repetitions of one token."""
