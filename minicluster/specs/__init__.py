"""Specs: facts about models, GPUs, clusters and loads as frozen values with their invariants."""
