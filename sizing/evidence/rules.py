"""How each engine fills its steps."""

from __future__ import annotations

from dataclasses import dataclass

from minicluster.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules:
    """
    How an engine fills a step.

    Attributes:
        mixes: prompts are computed in the same step as decoded tokens, which come first; else
            waiting prompts get steps of their own, and decoding pauses.
        chunks: a prompt that does not fit the rest of the budget is begun and continued in the
            next step; else it waits for a step with room, and has one of any size alone.
        token_budget: tokens of a step, by default.
        spare_tokens: recipes made for one load set the budget to batch + prompt + this many
            instead; `None`: they leave the default.
        max_batch_size: sequences of a step.
        reserved_fraction: share of a request's output whose KV cache has to be free before it is
            admitted.
        fp8_kv: whose KV cache is fp8 unless told otherwise: `small`, that of every model with
            weights of 8 bits or less; `requantised`, that of such weights of a model that its
            name stands for in other ones (ModelOpt writes the scales of an fp8 cache with them);
            not where weights are scaled in blocks: those checkpoints carry no such scales.
        split_since: version that first served prefill and decode apart; a lower one that does is
            the version of the server around it (Dynamo), which says nothing of the engine's.
        crowded: whose recipes for split pools send more users than decode has slots (`slots.py`).
        ahead_since: version that first put the next step together, by default, while one runs.
        source: where this is written.
    """

    mixes: bool
    chunks: bool
    token_budget: int
    spare_tokens: int | None
    max_batch_size: int
    reserved_fraction: float
    fp8_kv: str
    split_since: tuple[int, ...] = ()
    crowded: bool = False
    ahead_since: tuple[int, ...]
    source: str

    def budget(self, *, prompt_tokens: int, users: float, own_recipe: bool) -> int:
        """
        Tokens of a step where nobody says how many.

        Args:
            prompt_tokens: of the load.
            users: of the load, of one replica.
            own_recipe: the engine was configured for this very load.

        """
        if not own_recipe or self.spare_tokens is None:
            return self.token_budget
        return int(users) + prompt_tokens + self.spare_tokens


RULES = {
    "vllm": SchedulingRules(
        mixes=True,
        chunks=True,
        token_budget=8192,
        spare_tokens=1500,
        max_batch_size=1024,
        reserved_fraction=0.0,
        fp8_kv="requantised",
        ahead_since=(0, 14),
        source="vLLM 0.29 v1/core/sched/scheduler.py; engine/arg_utils.py, API server on 80 GB;"
        " spare_tokens: aiconfigurator 0.12 generator/rule_plugin/vllm.rule; ahead_since:"
        " v1/engine/core.py, step_with_batch_queue; pull request 27614",
    ),
    "trtllm": SchedulingRules(
        mixes=True,
        chunks=False,
        token_budget=8192,
        spare_tokens=500,
        max_batch_size=2048,
        reserved_fraction=1.0,
        fp8_kv="small",
        split_since=(1,),
        crowded=True,
        ahead_since=(1,),
        source="TensorRT-LLM 1.0 docs, llm-api reference: max_num_tokens, enable_chunked_prefill,"
        " CapacitySchedulerPolicy.GUARANTEED_NO_EVICT; fp8 checkpoints of NVIDIA quantise KV;"
        " spare_tokens: aiconfigurator 0.12 generator/rule_plugin/trtllm.rule; InferenceX: 64;"
        " split_since: TensorRT-LLM 1.0 docs, Disaggregated Serving (Beta); ahead_since: the same,"
        " Overlap Scheduler",
    ),
    "sglang": SchedulingRules(
        mixes=False,
        chunks=True,
        token_budget=8192,
        spare_tokens=None,
        max_batch_size=2048,
        reserved_fraction=0.5,
        fp8_kv="requantised",
        ahead_since=(0, 4),
        source="SGLang 0.5 srt/server_args.py: chunked_prefill_size on 80 GB, enable_mixed_chunk;"
        " managers/schedule_policy.py: new_token_ratio 0.7 falling to 0.1; ahead_since: SGLang"
        " 0.4 release, zero-overhead batch scheduler",
    ),
}
"""By engine; what recipes set otherwise is not known unless the row says it."""


def rules_of(engine: str, *, place: str) -> SchedulingRules:
    """
    Return how *engine* fills its steps.

    Raises:
        InputError: an engine of which nothing is known.

    """
    if engine.lower() not in RULES:
        raise InputError(place, engine, "one of " + ", ".join(RULES))
    return RULES[engine.lower()]
