"""What a client of an OpenAI-compatible endpoint needs: the key's header, and its stream."""
