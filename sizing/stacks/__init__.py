"""Plans in the terms of the engines and serving stacks that people run, and back."""

FORMAT_NAMES = ("vllm", "sglang", "trtllm", "dynamo", "llm-d", "kserve", "ray")
"""Names of `formats.FORMATS`, for help that imports none of their writers."""
