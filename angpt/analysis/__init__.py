"""What the paper measures inside of models, for any run: `angpt analyze`, and a function for each part."""
