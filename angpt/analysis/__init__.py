"""What the paper measures inside models, for any run: `angpt analyze`, and a function for each part."""
