"""The `angpt` command: one module per group of sub-commands; `main` puts them together."""
