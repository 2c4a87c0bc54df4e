"""Speed of training, data, optimizer and decoding, each measured in turns and against its floor."""
