"""Simulated engines: the engine model by the clock, without torch, vLLM or a model."""
