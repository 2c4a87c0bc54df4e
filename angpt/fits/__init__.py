"""Laws from many runs: how batch size and learning rate move with scale, and how the loss falls with compute."""
