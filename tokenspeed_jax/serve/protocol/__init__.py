"""Requests and replies as they stand on the wire: OpenAI's completions and chat, and vLLM's tokenize."""
