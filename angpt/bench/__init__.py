"""How fast the parts are: training, data, optimizer, each measured in turns and against its floor."""
