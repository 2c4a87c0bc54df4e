"""One trainer for all architectures: from a configuration to a run folder, interruptible at any moment."""
