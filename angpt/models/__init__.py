"""The three architectures of Table 1, their ablations, and what they are made of."""
