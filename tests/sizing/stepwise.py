"""The same system step by step and token by token: slow, plain, and written without the other."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import StepTime
from minicluster.routing import find_policy
from minicluster.workload.arrivals import Arrivals
from sizing.simulation.system import System


def blocks(tokens: int, size: int) -> int:
    return (tokens + size - 1) // size


@dataclass(eq=False)
class Job:
    number: int
    prompt: int
    outputs: int
    prefix: int = 0
    computed: int = 0
    held: int = 0
    must_pull: bool = False
    tokens_at: list[float] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    preemptions: int = 0
    decode: int = -1
    prefill: int = -1

    @property
    def tokens(self) -> int:
        """Tokens there are: the prompt's and those generated."""
        return self.prompt + len(self.tokens_at)


class StepReplica:
    """One engine; every step is scheduled from lists of requests, as vLLM does it."""

    def __init__(self, step: StepTime, limits: EngineLimits, *, prefill_only: bool) -> None:
        self.chunk = limits.options.chunked_prefill_tokens
        self.step, self.limits, self.prefill_only = step, limits, prefill_only
        self.waiting: list[Job] = []
        self.pulling: list[Job] = []
        self.arrived: list[Job] = []
        self.running: list[Job] = []
        self.free = limits.kv_blocks
        self.scheduled: list[tuple[Job, int]] = []
        self.end_s: float | None = None
        self.late: list[tuple[Job, float]] = []
        self.began_s = 0.0
        self.waited = 0
        self.unseen = 0

    def arrive(self, job: Job, now: float) -> None:
        """Queue a request; while a step runs, the next one may be scheduled already."""
        late = self.limits.rules.scheduled_ahead or self.limits.rules.receive_steps > 1
        if late and self.end_s is not None:
            self.late.append((job, now))
        else:
            self.waiting.append(job)

    def hold(self) -> bool:
        """Say whether prompts wait for others to fill the next step."""
        limits = self.limits
        tokens = len(self.running) + sum(job.tokens for job in self.waiting)
        held = (
            bool(self.waiting and self.running)
            and not self.waiting[0].must_pull
            and all(self.decoding(job) for job in self.running)
            and len(self.running) < limits.max_num_seqs
            and self.fits(self.waiting[0], self.coming())
            and self.waited < limits.rules.wait_steps
            and tokens < limits.rules.wait_fraction * limits.max_num_batched_tokens
        )
        self.waited = self.waited + 1 if held else 0
        return held

    def schedule(self, now: float) -> list[Job]:
        """Begin a step; return the requests whose pull begins with it."""
        seen = self.began_s if self.limits.rules.scheduled_ahead and self.running else now
        if self.unseen >= self.limits.rules.receive_steps or not self.running:
            self.unseen = 0
            while self.late and self.late[0][1] <= seen:
                self.waiting.append(self.late.pop(0)[0])
        self.began_s = now
        held = self.hold()
        begun: list[Job] = []
        self.scheduled = []
        prompts = bool(self.waiting) or not all(self.decoding(job) for job in self.running)
        if not self.limits.rules.mixed_steps and prompts and not held:
            self.join_arrived(self.limits.max_num_batched_tokens - len(self.running), now)
            begun = self.prompts_alone(now)
        if not self.scheduled:
            begun += self.mixed(now, held=held)
        return begun

    def prompts_alone(self, now: float) -> list[Job]:
        """Begin a step of prompts, if there are any: chunks first."""
        limits = self.limits
        budget = limits.max_num_batched_tokens
        for job in self.running:
            if not self.decoding(job) and budget > 0:
                new = min(
                    job.tokens - job.computed,
                    budget,
                    self.chunk or budget,
                )
                self.take(job, blocks(job.computed + new, limits.block_size) - job.held)
                self.scheduled.append((job, new))
                budget -= new
        begun = self.admit_waiting(budget, self.coming())
        for job, _ in self.scheduled:
            job.times.setdefault("admitted", now)
        if self.scheduled:
            self.end_s = now + self.step.step_s([(n, j.computed) for j, n in self.scheduled], 0, 0)
        return begun

    def mixed(self, now: float, *, held: bool) -> list[Job]:  # noqa: C901  (vLLM's order)
        """Begin a step as vLLM does."""
        size, limits = self.limits.block_size, self.limits
        budget = limits.max_num_batched_tokens
        threshold = self.chunk
        self.scheduled, victims, at = [], [], 0
        while at < len(self.running) and budget > 0:
            job = self.running[at]
            new = min(job.tokens - job.computed, budget, threshold or budget)
            need = blocks(job.computed + new, size) - job.held
            while need > self.free:
                victims.append(self.running.pop())
                self.evict(victims[-1])
                if victims[-1] is job:
                    break
            if job in victims:
                break
            self.take(job, need)
            self.scheduled.append((job, new))
            budget -= new
            at += 1
        begun: list[Job] = []
        if not victims:
            begun = self.admit(budget, now, held=held)
        for job, _ in self.scheduled:
            if not self.decoding(job):
                job.times.setdefault("admitted", now)
        chunks = [(n, j.computed) for j, n in self.scheduled if not self.decoding(j)]
        contexts = [j.computed for j, n in self.scheduled if self.decoding(j)]
        self.end_s = None
        if victims and not self.scheduled:
            return begun + self.mixed(now, held=False)  # a step of nothing takes no time
        if self.scheduled:
            self.end_s = now + self.step.step_s(chunks, len(contexts), sum(contexts))
        return begun

    def decoding(self, job: Job) -> bool:
        return "join" in job.times

    def admit(self, budget: int, now: float, *, held: bool) -> list[Job]:
        joined = self.join_arrived(budget, now)
        self.scheduled += [(job, 1) for job in joined]
        return [] if held else self.admit_waiting(budget - len(joined), 0)

    def join_arrived(self, budget: int, now: float) -> list[Job]:
        joined: list[Job] = []
        for job in [each for each in self.pulling if each in self.arrived]:
            if len(joined) >= budget or len(self.running) >= self.limits.max_num_seqs:
                break
            self.pulling.remove(job)
            self.arrived.remove(job)
            job.computed = job.prompt - 1
            job.times["join"] = now
            self.running.append(job)
            joined.append(job)
        return joined

    def admit_waiting(self, budget: int, coming: int) -> list[Job]:
        """Admit waiting requests; decoding ones need *coming* blocks that they do not have yet."""
        size, limits = self.limits.block_size, self.limits
        begun: list[Job] = []
        while self.waiting and budget > 0 and len(self.running) < limits.max_num_seqs:
            job = self.waiting[0]
            need = blocks(job.tokens, size)
            if not self.fits(job, coming):
                break
            cached = min(job.prefix, job.tokens - 1) // size * size
            others = any(not self.decoding(each) for each, _ in self.scheduled)
            whole = others and not (limits.rules.chunked_prefill or job.must_pull)
            if whole and job.tokens - cached > budget:
                break
            self.waiting.pop(0)
            if job.must_pull:
                job.must_pull = False
                self.take(job, need)
                self.pulling.append(job)
                begun.append(job)
                continue
            job.computed = cached
            new = job.tokens - job.computed
            if limits.rules.chunked_prefill:
                new = min(new, budget, self.chunk or new)
            self.take(job, blocks(job.computed + new, size))
            self.running.append(job)
            self.scheduled.append((job, new))
            budget -= new
        return begun

    def coming(self) -> int:
        """Blocks that decoding requests take in the next step."""
        decoding = [job for job in self.running if self.decoding(job)]
        return sum(blocks(j.computed + 1, self.limits.block_size) - j.held for j in decoding)

    def fits(self, job: Job, coming: int) -> bool:
        """Say whether a waiting request finds room beside the others, *coming* blocks theirs."""
        size, fraction = self.limits.block_size, self.limits.rules.kv_reserved_fraction
        spare, need = self.free - coming, blocks(job.tokens, size)
        if fraction and not self.prefill_only:
            held = [(each, each.held) for each in (*self.running, *self.pulling)] + [(job, need)]
            ahead = sum(blocks(j.prompt + j.outputs - 1, size) - taken for j, taken in held)
            spare -= math.ceil(fraction * (ahead - coming))
        if job.must_pull:
            spare -= sum(
                blocks(each.tokens, size) - each.held
                for each in self.running
                if not self.decoding(each)
            )
        return need <= spare

    def take(self, job: Job, need: int) -> None:
        self.free -= need
        job.held += need

    def evict(self, job: Job) -> None:
        """Preempt a request: it starts over, first in the queue."""
        self.take(job, -job.held)
        job.computed = 0
        job.times.pop("join", None)
        job.preemptions += 1
        self.waiting.insert(0, job)

    def end(self, now: float) -> list[Job]:
        """End the step; return the requests that are done."""
        done = []
        decodes = all(self.decoding(job) for job, _ in self.scheduled)
        self.unseen += 1 if decodes else self.limits.rules.receive_steps
        for job, new in self.scheduled:
            job.computed += new
            if job.computed < job.tokens:
                continue
            if self.prefill_only:
                done.append(job)
                continue
            job.tokens_at.append(now)
            job.times.setdefault("join", now)
            if len(job.tokens_at) == job.outputs:
                done.append(job)
                self.take(job, -job.held)
        self.running = [job for job in self.running if job not in done]
        return done


class StepTandem:
    """All replicas, and one event after the other."""

    def __init__(self, system: System, arrivals: Arrivals, *, seed: int) -> None:
        self.system = system
        self.rng = random.Random(seed)  # noqa: S311
        prefix = arrivals.prefix_tokens
        self.jobs = [
            Job(k, int(n), int(o), 0 if prefix is None else int(prefix[k]))
            for k, (n, o) in enumerate(
                zip(arrivals.input_tokens, arrivals.output_tokens, strict=True)
            )
        ]
        self.decode = [
            StepReplica(system.decode.step, system.decode.limits, prefill_only=False)
            for _ in range(system.decode.replicas)
        ]
        pool = system.prefill
        self.prefill = (
            [StepReplica(pool.step, pool.limits, prefill_only=True) for _ in range(pool.replicas)]
            if pool
            else []
        )
        self.events: list[tuple[float, int, int, object]] = []
        self.serial = self.turn = self.decode_turn = 0
        self.held: list[StepReplica] = []
        self.out_free = [0.0] * len(self.prefill)
        self.in_free = [0.0] * len(self.decode)
        self.met: set[tuple[int, int]] = set()
        self.arrivals = arrivals
        for job in self.jobs:
            if arrivals.previous is None or arrivals.previous[job.number] < 0:
                job.times["due"] = float(arrivals.due_s[job.number])
                self.put(job.times["due"] + system.path.request_s, 0, job)

    def put(self, time_s: float, kind: int, what: object) -> None:
        self.serial += 1
        self.events.append((time_s, kind, self.serial, what))

    def run(self) -> None:
        """Take the earliest event until there is none."""
        while self.events:
            event = min(self.events, key=lambda e: e[:3])
            self.events.remove(event)
            now, kind, _, what = event
            (self.land, self.pull, self.pulled, self.step_end)[kind](what, now)

    def begin(self, replica: StepReplica, now: float) -> None:
        for job in replica.schedule(now):
            self.put(now, 1, job)
        if replica.end_s is not None:
            self.put(replica.end_s, 3, replica)

    def land(self, job: Job, now: float) -> None:
        if self.prefill and job.prompt > self.system.local_threshold_tokens:
            by_tokens = find_policy(self.system.prefill_policy).counts_tokens
            loads = [
                sum(j.prompt if by_tokens else 1 for j in self.jobs
                    if j.prefill == p and "prefilled" not in j.times)
                for p in range(len(self.prefill))
            ]  # fmt: skip
            job.prefill = find_policy(self.system.prefill_policy).choose(loads, self.rng, self.turn)
            self.turn += 1
            replica = self.prefill[job.prefill]
        else:
            replica = self.decode_replica(job)
        replica.arrive(job, now)
        if replica.end_s is None and replica not in self.held:
            self.held.append(replica)
        if not any(event[:2] == (now, 0) for event in self.events):
            for each in self.held:
                self.begin(each, now)
            self.held.clear()

    def decode_replica(self, job: Job) -> StepReplica:
        """Choose where a request decodes."""
        by_tokens = find_policy(self.system.decode_policy).counts_tokens
        held = [[j for j in self.jobs if j.decode == d and "finish" not in j.times]
                for d in range(len(self.decode))]  # fmt: skip
        loads = [sum(j.prompt if by_tokens else 1 for j in jobs) for jobs in held]
        job.decode = find_policy(self.system.decode_policy).choose(
            loads, self.rng, self.decode_turn
        )
        self.decode_turn += 1
        return self.decode[job.decode]

    def step_end(self, replica: StepReplica, now: float) -> None:
        """End a step, begin the next, pass on what is done."""
        done = replica.end(now)
        self.begin(replica, now)
        for job in sorted(done, key=lambda j: j.number) if not replica.prefill_only else done:
            if replica.prefill_only:
                job.times["prefilled"] = now
                target = self.decode_replica(job)
                job.must_pull, job.computed = True, 0
                job.source_held, job.held = job.held, 0  # type: ignore[attr-defined]
                target.waiting.append(job)
                if target.end_s is None:
                    self.begin(target, now)
            else:
                self.finished(job, now)

    def finished(self, job: Job, now: float) -> None:
        job.times["finish"] = now
        previous = self.arrivals.previous
        if previous is not None:
            for follower in self.jobs:
                if previous[follower.number] == job.number:
                    think = self.arrivals.think_s
                    wait = 0.0 if think is None else float(think[follower.number])
                    follower.times["due"] = now + wait
                    self.put(now + wait + self.system.path.request_s, 0, follower)

    def pull(self, job: Job, now: float) -> None:
        path = self.system.path
        job.times["pull"] = now
        pair = (job.prefill, job.decode)
        extra = path.transfer_base_s + (path.handshake_s if pair not in self.met else 0.0)
        self.met.add(pair)
        start = max(now, self.out_free[job.prefill], self.in_free[job.decode])
        end = start + job.prompt * path.transfer_per_token_s
        self.out_free[job.prefill] = self.in_free[job.decode] = end
        self.put(end + extra, 2, job)

    def pulled(self, job: Job, now: float) -> None:
        """Join the decode replica; free the prefill replica's blocks."""
        job.times["pulled"] = now
        replica, source = self.decode[job.decode], self.prefill[job.prefill]
        replica.arrived.append(job)
        if replica.end_s is None:
            self.begin(replica, now)
        source.free += job.source_held  # type: ignore[attr-defined]
        if source.end_s is None and source.waiting:
            self.begin(source, now)
