"""The HTTP server: an OpenAI-compatible completions API in front of the engine's scheduler."""
