"""From a Hugging Face `config.json` to a model spec; weights are never touched."""
