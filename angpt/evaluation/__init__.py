"""How good a model is: loss on prepared data, and the paper's tasks through lm-evaluation-harness."""
