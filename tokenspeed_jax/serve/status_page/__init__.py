"""The page at `/`, and `GET /status`, which feeds it."""
