"""From text to batches: sources → tokenizers → shards on disk → loader."""
