"""A trained model as an HTTP server."""
