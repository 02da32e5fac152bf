"""The stacks that a plan is written for."""

TARGETS = ("vllm", "sglang", "trtllm", "dynamo", "llm-d", "kserve", "ray")
