"""The replica against vLLM's own scheduler: same batches, same order, same preemptions."""

from __future__ import annotations

import heapq
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minicluster.engine_model.limits import EngineLimits, LoraLimits
from minicluster.engine_model.lora_slots import LoraSlots
from minicluster.engine_model.prefix_cache import ContentCache
from minicluster.engine_model.replica import Replica
from minicluster.engine_model.request_table import RequestTable
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.specs.engine import EngineOptions, EngineRules
from minicluster.specs.step import StepCoefficients
from tests.serving.forks import Forks

DRIVER = Path(__file__).with_name("vllm_scheduler.py")
CASES = 200
SHARING = ("hit", "content")


class Recorder:
    """A replica that does each step by itself, and what it did in each."""

    def __init__(self, requests: RequestTable, replica: Replica) -> None:
        """Start with nothing seen."""
        self.requests, self.replica = requests, replica
        self.batches: list[list[tuple[int, int]]] = []
        self.preempted: list[list[int]] = []
        self.ends: list[float] = []
        self._seen = [0] * len(requests)

    def end_step(self, now_s: float) -> None:
        """Note the step that is over, with the requests preempted before it; begin the next."""
        counts = list(self.requests.num_preemptions)
        victims = [each for each, count in enumerate(counts) if count > self._seen[each]]
        new = dict(self.replica.scheduled_prefills)
        self.batches.append([(each, new.get(each, 1)) for each in self.replica.running])
        self.preempted.append(victims)
        self.ends.append(self.replica.end_s)
        self._seen = counts
        self.replica.end_stretch()
        self.replica.start_stretch(now_s)


def drawn(seed: int, kind: str) -> dict[str, Any]:
    """
    Draw one case.

    `hit` shares a prefix that the first request has left behind, `content` blocks of a tree, with
    memory for all of them: there requests that share a block share its memory, too. `adapters`
    has five of them for one to three slots.
    """
    rng = np.random.default_rng([seed, len(kind)])
    count = int(rng.integers(2, 25))
    size = int(rng.choice([4, 16]))
    prompts = rng.integers(1, 100, count)
    outputs = rng.integers(1, 40, count)
    due = np.cumsum(rng.exponential(rng.choice([0.01, 0.1]), count))
    prefix = np.zeros(count, dtype=int)
    if kind == "hit":
        prefix = np.minimum(rng.integers(0, 64, count), prompts)
        prompts[0], prefix[0], outputs[0], due[0] = 64, 64, 1, 0.0
        due[1:] += 10.0
    content: list[tuple[int, ...]] = [()] * count
    if kind == "content":
        content = [branch(rng, int(n) // size) for n in prompts]
    needed = -(-int((prompts + outputs).max()) // size)
    seqs = int(rng.integers(1, 9))
    tight = kind not in SHARING and rng.random() < 0.7
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=int(rng.integers(seqs, 80)),
        kv_blocks=needed + int(rng.integers(1, needed + 2)) if tight else 20 * needed + 50,
        block_size=size,
        options=EngineOptions(
            chunked_prefill_tokens=int(rng.choice([0, 0, 9])),
            watermark_fraction=float(rng.choice([0, 0, 0, 0.05, 0.3])),
        ),
    )
    step = StepCoefficients(
        base_s=float(rng.uniform(1e-3, 5e-3)), stream_s=1e-3,
        per_prefill_token_s=float(rng.uniform(1e-5, 1e-4)), per_sequence_s=2e-4, per_pair_s=1e-7,
        per_context_token_s=1e-6, max_tokens=1, max_batch=1, max_context_tokens=1,
        error_fraction=0.0,
    )  # fmt: skip
    return {
        "limits": asdict(limits), "step": asdict(step), "prefix_caching": kind in SHARING,
        "due_s": due.tolist(), "input_tokens": prompts.tolist(), "output_tokens": outputs.tolist(),
        "prefix": prefix.tolist(), "content": content,
        "pull_s": rng.uniform(0.001, 0.05, count).tolist() if kind == "pull" else None,
        "slots": int(rng.integers(1, 4)) if kind == "adapters" else None,
        "adapter": rng.integers(0, 5, count).tolist(),
    }  # fmt: skip


def branch(rng: np.random.Generator, depth: int) -> tuple[int, ...]:
    """Walk down a tree of two branches a block; return the numbers of its nodes."""
    node, path = 1, []
    for _ in range(min(depth, 8)):
        node = 2 * node + int(rng.random() < 0.3)
        path.append(node)
    return tuple(path)


def limits_of(case: dict[str, Any]) -> EngineLimits:
    """Return the case's limits, which are vLLM's: the rules are the defaults."""
    options = EngineOptions(**case["limits"]["options"])
    return EngineLimits(**case["limits"] | {"options": options, "rules": EngineRules()})


def slots_of(case: dict[str, Any]) -> LoraSlots | None:
    """Return the case's slots for adapters, copied in no time."""
    if case["slots"] is None:
        return None
    limits = LoraLimits(slots=case["slots"], load_s=0.0)
    return LoraSlots(case["adapter"], limits, [0] * len(case["adapter"]))


def simulated(case: dict[str, Any]) -> Recorder:
    """Run one replica over the case."""
    shared = [0, *case["prefix"][1:]]
    requests = RequestTable(case["input_tokens"], case["output_tokens"], shared)
    step = PlannedStep(StepCoefficients(**case["step"]))
    limits = limits_of(case)
    cache = (
        ContentCache(case["content"], limits.block_size, tokens_each=limits.block_size)
        if any(case["content"])
        else None
    )
    replica = Replica(requests, step, limits, prefix_cache=cache, stepwise=True)
    replica.lora = slots_of(case)
    recorder = Recorder(requests, replica)
    heap: list[tuple[float, int, int]] = [
        (due, 0, number) for number, due in enumerate(case["due_s"])
    ]
    while heap:
        now, kind, what = heapq.heappop(heap)
        if kind == 0 and case["pull_s"] is None:
            replica.add(what, now)
        elif kind == 0:
            replica.add_remote_prefill(what, now)
        elif kind == 1:
            replica.kv_received(what, now)
        elif replica.active and replica.end_s == now:
            recorder.end_step(now)
        for number, time_s in replica.started_pulls:
            heapq.heappush(heap, (time_s + case["pull_s"][number], 1, number))
        replica.started_pulls.clear()
        if replica.active and replica.end_s != replica.queued_s:
            replica.queued_s = replica.end_s
            heapq.heappush(heap, (replica.end_s, 2, 0))
    return recorder


KINDS = ("local", "pull", "hit", "content", "adapters")


@pytest.fixture(scope="module")
def vllm_answers(
    tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> dict[str, list[dict[str, Any]]]:
    """Return what vLLM's scheduler did in every case of each kind."""
    folder = tmp_path_factory.mktemp("vllm")
    given, answered = folder / "cases.json", folder / "answers.json"
    cases = [drawn(seed, kind) for kind in KINDS for seed in range(CASES)]
    given.write_text(json.dumps(cases), encoding="utf-8")
    forks.run(DRIVER.read_text(encoding="utf-8"), str(given), str(answered))
    answers = json.loads(answered.read_text(encoding="utf-8"))
    assert len(answers) == len(cases)
    return {kind: answers[n * CASES : (n + 1) * CASES] for n, kind in enumerate(KINDS)}


@pytest.mark.parametrize("kind", KINDS)
def test_same_batches_as_vllm(kind: str, vllm_answers: dict[str, list[dict[str, Any]]]) -> None:
    """Each step has the same requests, in the same order, with as many tokens; same victims."""
    preemptions = 0
    for seed, answer in enumerate(vllm_answers[kind]):
        recorder = simulated(drawn(seed, kind))
        batches = [[list(each) for each in batch] for batch in recorder.batches]
        assert batches == answer["batches"], f"case {seed}"
        assert recorder.preempted == answer["preempted"], f"case {seed}"
        np.testing.assert_allclose(recorder.ends, answer["ends"], rtol=1e-9, err_msg=f"case {seed}")
        preemptions += sum(map(len, recorder.preempted))
    assert (preemptions > CASES) == (kind not in SHARING)
