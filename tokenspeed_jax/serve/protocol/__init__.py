"""Requests and replies as they stand on the wire: OpenAI's, Anthropic's, SGLang's, and vLLM's tokenize."""
