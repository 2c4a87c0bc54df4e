"""An analysis as files: analysis.json, analysis.md with its tables, and figures/."""

from collections.abc import Sequence
from pathlib import Path

from angpt.analysis.analyse import Analysis
from angpt.analysis.charts import LAYER_CHARTS, layer_histories
from angpt.analysis.claims import claims, claims_table
from angpt.analysis.shift_charts import SHIFT_CHARTS
from angpt.analysis.tables import tables
from angpt.present.charts import Chart, write_chart
from angpt.present.layers import input_norms, row_norms
from angpt.present.words import quantity, without_html
from angpt.system import write_atomically


def write_analysis(analysis: Analysis, out: Path, command: str) -> Path:
    """Write everything into the folder `out` and return the path of analysis.md."""
    analysis.write(out / "analysis.json")
    recorded = layer_histories(analysis, "norms")
    found = [input_norms(recorded), row_norms(recorded)]
    found += [make(analysis) for make in (*LAYER_CHARTS, *SHIFT_CHARTS)]
    charts = [chart for chart in found if isinstance(chart, Chart)]
    write_charts(charts, out)
    path = out / "analysis.md"
    write_atomically(path, markdown(analysis, charts, command))
    return path


def write_charts(charts: Sequence[Chart], out: Path) -> None:
    """Write the files of each chart into the subfolder `figures`."""
    figures = out / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for chart in charts:
        write_chart(chart, figures)


def markdown(analysis: Analysis, charts: Sequence[Chart], command: str) -> str:
    """The text of analysis.md."""
    lines = ["# Inside the models", "", f"Made by `{command}`.", ""]
    lines += [
        f"- {run.label}: {quantity(run.parameters)} parameters, {run.layers} layers, context {run.context:,}, "
        f"{quantity(run.tokens)} tokens, seed {run.seed}; measured on {run.measured_tokens:,} tokens"
        for run in analysis.runs
    ]
    if found := claims(analysis):
        lines += ["", "## Claims of the paper", "", claims_table(found).markdown()]
    lines += ["", "## Tables", ""]
    for table in tables(analysis):
        lines += [table.markdown(), ""]
    if charts:
        lines += ["## Figures", ""]
    for chart in charts:
        lines += [f"![{chart.alt}](figures/{chart.name}.png)", "", f"*{chart.title}. {chart.caption}*", ""]
    return without_html("\n".join(lines))
