"""Each part of an analysis measured alone, in its own pass."""

from angpt.analysis.attention import AttentionProbe
from angpt.analysis.factors import FactorProbe
from angpt.analysis.history import History
from angpt.analysis.norms import NormProbe, collect
from angpt.analysis.probe import observe
from angpt.analysis.robustness import compare, shift


def measure_norms(model, batches, history=None):
    probe = NormProbe(len(model.blocks))
    observe(model, batches, [probe])
    return collect(model, probe, history or History())


def measure_factors(model, batches):
    probe = FactorProbe()
    observe(model, batches, [probe])
    return probe.results()


def measure_attention(model, batches):
    probe = AttentionProbe()
    observe(model, batches, [probe])
    return probe.results()


def measure_robustness(model, text, conditions, batch_tokens):
    batches, probe = list(text), NormProbe(len(model.blocks))
    loss = observe(model, batches, [probe])
    sequences = sum(len(batch.inputs) for batch in batches)
    base = shift("text", "validation text", sequences, batches[0].inputs.shape[1], loss, probe.stream())
    return compare(model, base, conditions, batch_tokens)
