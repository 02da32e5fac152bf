"""
Drives vLLM's own scheduler on a fixed clock, without a model: cases in, batches out, as JSON.

`test_vllm_scheduler.py` runs it in a fork of the process that has imported vLLM.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from minicluster.config import parse
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.step import StepCoefficients

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100_000, "max_position_embeddings": 8192,
}  # fmt: skip


class Pulls:
    """A connector for which whole prompts are elsewhere, as NIXL's decode side sees them."""

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __init__(self) -> None:
        """Start with no prompt anywhere."""
        self.remote: set[str] = set()
        self.begun: list[str] = []

    def get_num_new_matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Say how many tokens can be pulled, and that this takes a while."""
        if request.request_id in self.remote:
            return len(request.prompt_token_ids) - computed, True
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: object, external: int) -> None:  # noqa: ARG002
        """Note a pull that begins; it is asked for once."""
        if external:
            self.remote.discard(request.request_id)
            self.begun.append(request.request_id)

    def request_finished(self, *_: object) -> tuple[bool, None]:
        """Let blocks go."""
        return False, None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Do nothing else."""
        return lambda *_args, **_named: None


class Engine:
    """One scheduler and its clock."""

    def __init__(self, case: dict[str, Any], model: str) -> None:
        """Build vLLM's scheduler for *case*."""
        limits, self.case = case["limits"], case
        self.step = PlannedStep(parse(StepCoefficients, case["step"], place="case"))
        cache = CacheConfig(
            block_size=limits["block_size"], enable_prefix_caching=case["prefix_caching"]
        )
        cache.num_gpu_blocks = limits["kv_blocks"] + 1  # one is the null block
        config = VllmConfig(
            model_config=ModelConfig(
                model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=8192
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=limits["max_num_seqs"],
                max_num_batched_tokens=limits["max_num_batched_tokens"],
                max_model_len=8192,
                long_prefill_token_threshold=limits["options"]["chunked_prefill_tokens"],
                watermark=limits["options"]["watermark_fraction"],
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            cache_config=cache,
            lora_config=LoRAConfig(max_loras=case["slots"]) if case["slots"] else None,
        )
        layer = FullAttentionSpec(
            block_size=limits["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=limits["kv_blocks"] + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], layer)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=limits["block_size"],
        )
        self.pulls = Pulls()
        if case["pull_s"] is not None:
            self.scheduler.connector = self.pulls
        self.arriving: dict[str, float] = {}
        self.decoding: set[str] = set()
        self.due = list(enumerate(case["due_s"]))
        self.batches: list[list[tuple[int, int]]] = []
        self.preempted: list[list[int]] = []
        self.ends: list[float] = []

    def request(self, number: int) -> Request:
        """Return request *number*; its first tokens are those that `prefix` and `content` say."""
        case = self.case
        own = 1 + number
        prompt = [7] * case["prefix"][number]
        for block in case["content"][number]:
            prompt += [20_000 + block] * case["limits"]["block_size"]
        prompt += [50_000 + own] * (case["input_tokens"][number] - len(prompt))
        hasher = get_request_block_hasher(case["limits"]["block_size"], sha256)
        return Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=case["output_tokens"][number], ignore_eos=True
            ),
            pooling_params=None,
            block_hasher=hasher if case["prefix_caching"] else None,
            lora_request=self.adapter(number) if case["slots"] else None,
        )

    def take(self, now: float) -> None:
        """Add the requests that have arrived."""
        while self.due and self.due[0][1] <= now:
            number, _ = self.due.pop(0)
            if self.case["pull_s"] is not None:
                self.pulls.remote.add(str(number))
            self.scheduler.add_request(self.request(number))

    def adapter(self, number: int) -> LoRARequest:
        """Return the adapter of request *number*."""
        at = self.case["adapter"][number]
        return LoRARequest(lora_name=str(at), lora_int_id=at + 1, lora_path="/none")

    def run(self) -> dict[str, Any]:
        """Step until nothing is left."""
        now, scheduler = 0.0, self.scheduler
        victims: list[int] = []
        while self.due or scheduler.has_unfinished_requests():
            self.take(now)
            output = scheduler.schedule()
            for name in self.pulls.begun:
                self.arriving[name] = now + self.case["pull_s"][int(name)]
            self.pulls.begun.clear()
            lost = output.preempted_req_ids or set()
            self.decoding -= lost
            victims += sorted(int(name) for name in lost)
            scheduled = output.num_scheduled_tokens
            if scheduled:
                now += self.note(scheduled, victims)
                victims = []
                self.ends.append(now)
            elif not lost:
                waiting = [time_s for _, time_s in self.due[:1]] + list(self.arriving.values())
                if not waiting:
                    raise RuntimeError("nothing to do, and nothing to wait for")
                now = max(now, min(waiting))
            self.update(output, now)
        return {"batches": self.batches, "preempted": self.preempted, "ends": self.ends}

    def note(self, scheduled: dict[str, int], victims: list[int]) -> float:
        """Keep a batch; return how long it takes."""
        self.batches.append([(int(name), new) for name, new in scheduled.items()])
        self.preempted.append(victims)
        chunks, batch, context = [], 0, 0
        for name, new in scheduled.items():
            before = self.scheduler.requests[name].num_computed_tokens - new
            if name in self.decoding:
                batch, context = batch + 1, context + before
            else:
                chunks.append((new, before))
        return self.step.step_s(chunks, batch, context)

    def update(self, output: SchedulerOutput, now: float) -> None:
        """Tell the scheduler what came out: a token for each request whose prompt is done."""
        names = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [[] if requests[name].is_prefill_chunk else [11] for name in names]
        self.decoding |= {name for name, new in zip(names, tokens, strict=True) if new}
        arrived = {name for name, time_s in self.arriving.items() if time_s <= now}
        for name in arrived:
            del self.arriving[name]
            self.decoding.add(name)
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=KVConnectorOutput(finished_recving=arrived) if arrived else None,
        )
        self.scheduler.update_from_output(output, result)


def main() -> None:
    """Read cases from the first file, write answers to the second."""
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        answers = [Engine(case, model).run() for case in cases]
    Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
