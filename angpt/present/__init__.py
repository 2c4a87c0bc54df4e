"""Charts, tables and numbers in words, for pages, terminals and files."""
