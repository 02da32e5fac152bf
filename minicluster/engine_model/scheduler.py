"""An engine's scheduler: its requests, and those in its next step."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from minicluster.engine_model.decode_batch import DecodeBatch

if TYPE_CHECKING:
    from minicluster.engine_model.kv_offload import HostCache
    from minicluster.engine_model.limits import EngineLimits
    from minicluster.engine_model.lora_slots import LoraSlots
    from minicluster.engine_model.prefix_cache import PrefixCache
    from minicluster.engine_model.request_table import RequestTable
    from minicluster.engine_model.step_seconds import StepTime


class Scheduler(DecodeBatch):
    """
    Waiting, prefilling and decoding requests of one engine (docs/model.md, eq. Q1 and Q10).

    As vLLM V1 does it, a step takes running requests first, then requests whose KV cache has
    arrived from a prefill replica, then waiting ones, while its token budget, sequences and KV
    blocks last. Every decoding request takes one token of the budget; `DecodeBatch` keeps these as
    counts. The `EngineRules` of its limits change that for other engines.

    Attributes:
        waiting: requests that have not been admitted, in order.
        remote_prefills: of those, requests that pull their KV cache instead of computing it.
        waiting_for_kv: admitted requests whose pull is not over or that have not joined yet, in
            order; they hold blocks.
        kv_arrived: of those, requests whose pull is over.
        started_pulls: pulls begun and not yet collected by the caller: request and time.
        offload: blocks in host memory and on disk; `None`: none.
        started_loads: loads from there, begun and not yet collected: request and end.
        lora: adapters of the running requests; `None`: none have any.
        running: admitted requests, in order; the last one is preempted first.
        prefilling: of those, requests with an unfinished prompt: tokens computed so far.
        scheduled_prefills: requests whose prompts are computed in this step, and tokens of each.
        newly_joined: pulled requests that decode and have got no token yet.
        pending_delays: delays of the decode batch by coming requests (eq. Q9), not yet counted.
        prefill_only: requests end with their prompt, and keep their blocks until they are pulled.
    """

    __slots__ = (
        "_final_blocks", "_loaded", "_long_prefill_token_threshold", "_max_num_batched_tokens",
        "_max_num_seqs", "_num_blocks", "_passed", "_rules", "_sequence_tokens", "_waited",
        "_watermark_blocks",
        "kv_arrived", "lora", "newly_joined", "offload", "pending_delays", "prefill_only",
        "prefilling", "prefix_cache", "remote_prefills", "running", "scheduled_prefills",
        "started_loads", "started_pulls", "waiting", "waiting_for_kv",
    )  # fmt: skip

    def __init__(
        self,
        requests: RequestTable,
        step: StepTime,
        limits: EngineLimits,
        *,
        prefill_only: bool = False,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        """
        Start idle and empty.

        Args:
            requests: the table that results are written to.
            step: seconds of steps.
            limits: the engine's settings.
            prefill_only: the replica is one of a prefill pool; see the attribute.
            prefix_cache: prompt tokens that requests may find; `None`: none.
        """
        super().__init__(requests, step, limits)
        self._sequence_tokens = limits.sequence_tokens
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._max_num_seqs = limits.max_num_seqs
        self._long_prefill_token_threshold = (
            limits.options.chunked_prefill_tokens or limits.max_num_batched_tokens
        )
        self._num_blocks = limits.kv_blocks
        # Of all blocks, vLLM's null block included.
        watermark = limits.options.watermark_fraction
        self._watermark_blocks = int(watermark * (limits.kv_blocks + 1))
        self._rules = rules = limits.rules
        if prefill_only:  # nothing is generated there
            self._rules = replace(rules, kv_reserved_fraction=0.0)
        self._final_blocks = self._waited = 0
        self.prefill_only = prefill_only
        self.prefix_cache = prefix_cache
        self.waiting: deque[int] = deque()
        self.remote_prefills: set[int] = set()
        self.waiting_for_kv: dict[int, None] = {}
        self.kv_arrived: set[int] = set()
        self.started_pulls: list[tuple[int, float]] = []
        self.running: dict[int, None] = {}
        self.prefilling: dict[int, int] = {}
        self.scheduled_prefills: list[tuple[int, int]] = []
        self.newly_joined: list[int] = []
        self.pending_delays = 0
        self.offload: HostCache | None = None
        self.lora: LoraSlots | None = None
        # First waiting requests that have been passed by others, because of their adapters.
        self._passed = 0
        self.started_loads: list[tuple[int, float]] = []
        self._loaded: dict[int, int] = {}

    def schedule(self, now_s: float) -> bool:
        """
        Choose the requests of the step that begins now.

        Returns:
            Whether waiting requests were considered; after a preemption they are not, nor while
            they wait for others.
        """
        self.scheduled_prefills.clear()
        held = self._rules.wait_steps > 0 and self._prompts_wait()
        if not self._rules.mixed_steps and not held and self._schedule_prompts(now_s):
            return True
        token_budget, may_admit = self._decode_rest(), True
        free = self._num_blocks - self.used_blocks
        if self.prefilling or (self.batch and free < self._blocks_of_next_step()):
            token_budget, may_admit = self._schedule_running(token_budget, free)
        if may_admit or not self.running:  # a step of nothing takes no time; the next one admits
            if self.kv_arrived:
                token_budget -= self.schedule_arrived(token_budget)
            if self.waiting and not held:
                self._schedule_waiting(token_budget, now_s)
        return may_admit and not held

    def _decode_rest(self) -> int:
        return self._max_num_batched_tokens - self.batch * self._sequence_tokens

    def _prompts_wait(self) -> bool:
        decodes = self.batch > 0 and not self.prefilling
        held = decodes and self._waited < self._rules.wait_steps and self._prompt_fits()
        if held:
            tokens = self.batch + sum(map(self._num_tokens, self.waiting))
            held = tokens < self._rules.wait_fraction * self._max_num_batched_tokens
        self._waited = self._waited + 1 if held else 0
        return held

    def _prompt_fits(self) -> bool:
        if not self.waiting or len(self.running) >= self._max_num_seqs:
            return False
        request = self.waiting[0]
        if request in self.remote_prefills:
            return False
        num_blocks = -(-self._num_tokens(request) // self._block_size)
        return num_blocks <= self._free_blocks(request, num_blocks, self._blocks_of_next_step())

    def _schedule_prompts(self, now_s: float) -> bool:
        """Schedule prompts alone, if there are any: first those in progress; decoding pauses."""
        if not (self.prefilling or self.waiting):
            return False
        if self.kv_arrived:
            self.schedule_arrived(self._decode_rest())
        token_budget = self._max_num_batched_tokens
        for request, num_computed in self.prefilling.items():
            if token_budget > 0:
                num_new_tokens = self._next_tokens(request, token_budget)
                self._compute(request, num_computed, num_new_tokens)
                token_budget -= num_new_tokens
        self._schedule_waiting(token_budget, now_s)
        return bool(self.scheduled_prefills)

    def _next_tokens(self, request: int, token_budget: int) -> int:
        rest = self._num_tokens(request) - self.prefilling[request]
        return min(rest, self._long_prefill_token_threshold, token_budget)

    def _compute(self, request: int, num_computed: int, num_new_tokens: int) -> None:
        size, end = self._block_size, num_computed + num_new_tokens
        self.used_blocks += -(-end // size) - -(-num_computed // size)
        self.scheduled_prefills.append((request, num_new_tokens))
        if self.prefix_cache is not None:
            self.prefix_cache.cache(request, end)

    def _schedule_running(self, token_budget: int, free: int) -> tuple[int, bool]:
        """
        Schedule the running requests, preempting the last one while blocks are missing.

        Args:
            token_budget: what sequences that decode leave of it.
            free: blocks.

        Returns:
            The token budget left, and whether waiting requests may be admitted.
        """
        last = next(reversed(self.running))
        if last in self.prefilling and len(self.prefilling) == 1:
            # Usually one prompt is in progress, behind all that decode, and blocks are enough.
            num_new_tokens = self._next_tokens(last, token_budget)
            end, size = self.prefilling[last] + num_new_tokens, self._block_size
            new_blocks = -(-end // size) - -(-self.prefilling[last] // size)
            if new_blocks + self._blocks_of_next_step() <= free:
                self._compute(last, self.prefilling[last], num_new_tokens)
                return token_budget - num_new_tokens, True
        return self._schedule_in_order(free)

    def _schedule_in_order(self, free: int) -> tuple[int, bool]:
        """Schedule the running requests one by one; see `_schedule_running`."""
        token_budget, preempted, size = self._max_num_batched_tokens, False, self._block_size
        tokens = self.tokens_in(1)
        for request in list(self.running):
            if request not in self.running:
                break
            num_computed = self.prefilling.get(request)
            if num_computed is None:
                num_new_tokens = self._sequence_tokens
                cached = self._context_base[request] + self.num_tokens
                new_blocks = self._blocks_of(cached + tokens) - self._blocks_of(cached)
            else:
                num_new_tokens = self._next_tokens(request, token_budget)
                new_blocks = -(-(num_computed + num_new_tokens) // size) - -(-num_computed // size)
            while new_blocks > free and request in self.running:
                free += self.preempt()
                preempted = True
            if request not in self.running:
                break
            free -= new_blocks
            token_budget -= num_new_tokens
            if num_computed is not None:
                self._compute(request, num_computed, num_new_tokens)
        return token_budget, not preempted

    def schedule_arrived(self, token_budget: int) -> int:
        """Let pulled requests decode, in the order in which their pulls began; return how many."""
        joined, blocks = 0, self._watermark_blocks
        for request in [each for each in self.waiting_for_kv if each in self.kv_arrived]:
            if blocks and self.running and self._blocks_beside_decode() < blocks:
                break
            if joined >= token_budget or len(self.running) >= self._max_num_seqs:
                break
            if not self.adapter_fits(request):
                continue
            self.start_decoding(request)
            joined += 1
        return joined

    def adapter_fits(self, request: int) -> bool:
        """Say whether a batch with a request more has no more adapters than slots."""
        return self.lora is None or self.lora.fits(request)

    def _run(self, request: int) -> None:
        self.running[request] = None
        if self.lora is not None:
            self.lora.add(request)

    def _stop(self, request: int) -> None:
        del self.running[request]
        if self.lora is not None:
            self.lora.remove(request)

    def start_decoding(self, request: int) -> None:
        """Let a request whose KV cache has arrived decode."""
        del self.waiting_for_kv[request]
        self.kv_arrived.discard(request)
        self._run(request)
        # The last prompt token is computed again, so that its logits are there. That step verifies
        # no drafts, and gives one token: what the others get beyond it is taken off before.
        prompt, size = self._requests.num_prompt_tokens[request], self._block_size
        more = self.tokens_in(1) - 1
        cached = prompt - 1 - more
        # Its first step takes these blocks by eq. Q3.
        self.used_blocks -= -(-prompt // size) - -(-cached // size)
        self.join(request, cached, self._requests.max_tokens[request] + more)
        self.newly_joined.append(request)
        if self._step.join_delay_s:
            self.pending_delays += 1

    def _schedule_waiting(self, token_budget: int, now_s: float) -> None:
        """
        Admit waiting requests while tokens, sequences and blocks last.

        Those whose adapters would be more than there are slots let others pass.
        """
        waiting, running, size = self.waiting, self.running, self._block_size
        decode_blocks = self._blocks_of_next_step() if self.batch else 0
        passed: list[int] = []
        while waiting and token_budget > 0 and len(running) < self._max_num_seqs:
            request = waiting[0]
            if not self.adapter_fits(request):
                passed.append(self._pop_waiting())
                continue
            num_tokens = self._num_tokens(request)
            num_blocks = -(-num_tokens // size)
            remote = request in self.remote_prefills
            whole = not (self._rules.chunked_prefill or remote)
            if num_blocks > self._free_blocks(request, num_blocks, decode_blocks) or (
                whole and self._overfills(request, token_budget)
            ):
                break
            self._pop_waiting()
            if self._rules.kv_reserved_fraction:
                self._final_blocks += self._blocks_at_end(request)
            if remote:
                self.start_pull(request, num_blocks, now_s)
                continue
            cached = self._take_cached(request, num_tokens, now_s)
            if cached < 0:
                continue
            num_new_tokens = num_tokens - cached
            if self._rules.chunked_prefill:
                num_new_tokens = min(
                    num_new_tokens, self._long_prefill_token_threshold, token_budget
                )
            self._start_prompt(request, cached, num_new_tokens, now_s)
            token_budget -= num_new_tokens
        waiting.extendleft(reversed(passed))
        self._passed += len(passed)

    def _pop_waiting(self) -> int:
        self._passed -= self._passed > 0
        return self.waiting.popleft()

    def _start_prompt(self, request: int, cached: int, num_new_tokens: int, now_s: float) -> None:
        self._run(request)
        self.prefilling[request] = cached
        self.used_blocks += -(-cached // self._block_size)
        self._compute(request, cached, num_new_tokens)
        scheduled_s = self._requests.scheduled_s
        scheduled_s[request] = min(scheduled_s[request], now_s)

    def _take_cached(self, request: int, num_tokens: int, now_s: float) -> int:
        """
        Return the first tokens of a prompt that are on the GPUs; -1: more are being loaded.

        A request that loads has taken the blocks of its whole prompt, so that it can be computed.
        """
        num_blocks = -(-num_tokens // self._block_size)
        if request in self._loaded:
            self.used_blocks -= num_blocks
            return self._loaded.pop(request)
        cached = self._find_cached(request, num_tokens)
        if self.offload is None:
            return cached
        most = (num_tokens - 1) // self._block_size * self._block_size
        found, end_s = self.offload.load(request, cached, num_tokens, most, now_s)
        if found == cached:
            return cached
        self.used_blocks += num_blocks
        self._loaded[request] = found
        if self.prefix_cache is not None:
            self.prefix_cache.cache(request, cached)
        if not self._requests.num_output_tokens[request]:
            self._requests.num_cached_tokens[request] = found
        self.started_loads.append((request, end_s))
        return -1

    def _overfills(self, request: int, token_budget: int) -> bool:
        """Say whether a whole prompt is too long for a step that holds others; known prefixes."""
        num_tokens, size = self._num_tokens(request), self._block_size
        cached = min(self._requests.num_prefix_tokens[request], num_tokens - 1) // size * size
        return bool(self.scheduled_prefills) and num_tokens - cached > token_budget

    def _free_blocks(self, request: int, num_blocks: int, decode_blocks: int) -> int:
        """Blocks that a waiting request of *num_blocks* may take, less those kept for outputs."""
        used = self.used_blocks + decode_blocks
        free = self._num_blocks - used - (self._watermark_blocks if self.running else 0)
        if request in self._loaded:
            return num_blocks + min(0, free)
        if self._rules.kv_reserved_fraction:
            ahead = self._final_blocks - used + self._blocks_at_end(request) - num_blocks
            free -= ceil(self._rules.kv_reserved_fraction * ahead)
        if request in self.remote_prefills:
            free -= self._reserved_blocks()
        return free

    @property
    def keeps_blocks_free(self) -> bool:
        """True if some free blocks are kept from new requests."""
        return self._rules.kv_reserved_fraction > 0 or self._watermark_blocks > 0

    def _blocks_beside_decode(self) -> int:
        return self._num_blocks - self.used_blocks - self._blocks_of_next_step()

    def _blocks_at_end(self, request: int) -> int:
        """Blocks that a request has filled when its last token is out."""
        requests = self._requests
        num_tokens = requests.num_prompt_tokens[request] + requests.max_tokens[request] - 1
        return self._blocks_of(num_tokens)

    def resume(self, request: int) -> bool:
        """Take a sequence with its KV cache, to decode from the next step on, if it has room."""
        num_blocks = -(-self._requests.num_prompt_tokens[request] // self._block_size)
        if self.used_blocks + num_blocks > self._num_blocks:
            return False
        if self._rules.kv_reserved_fraction:
            self._final_blocks += self._blocks_at_end(request)
        self.used_blocks += num_blocks
        self.waiting_for_kv[request] = None
        self.kv_arrived.add(request)
        return True

    def start_pull(self, request: int, num_blocks: int, now_s: float) -> None:
        """Give a request the blocks of its prompt, and begin to pull its KV cache into them."""
        self.used_blocks += num_blocks
        self.remote_prefills.discard(request)
        self.waiting_for_kv[request] = None
        self.started_pulls.append((request, now_s))

    def _find_cached(self, request: int, num_tokens: int) -> int:
        """Prompt tokens found cached: whole blocks, and never the last token (eq. Q4)."""
        requests = self._requests
        found = requests.num_prefix_tokens[request]
        if self.lora is not None and not self.lora.knows_prefix(request):
            found = 0
        if self.prefix_cache is not None:
            free = self._num_blocks - self.used_blocks
            found = max(found, self.prefix_cache.find(request, free))
        cached = min(found, num_tokens - 1) // self._block_size * self._block_size
        if not requests.num_output_tokens[request]:
            requests.num_cached_tokens[request] = cached
        return cached

    def _reserved_blocks(self) -> int:
        """Blocks that unfinished prompts still need; a pull must leave them."""
        size, num_computed = self._block_size, self.prefilling
        return sum(
            -(-self._num_tokens(request) // size)
            - -(-(num_computed[request] + num_new_tokens) // size)
            for request, num_new_tokens in self.scheduled_prefills
        )

    def _num_tokens(self, request: int) -> int:
        requests = self._requests
        return requests.num_prompt_tokens[request] + requests.num_output_tokens[request]

    def preempt(self) -> int:
        """Put the last running request back in front of the queue; return its blocks."""
        request = next(reversed(self.running))
        self._stop(request)
        if self._rules.kv_reserved_fraction:
            self._final_blocks -= self._blocks_at_end(request)
        before = self.used_blocks
        num_computed = self.prefilling.pop(request, None)
        requests = self._requests
        if num_computed is None:
            delay_s = self.delay_of(request)
            lacking = self.leave(request)
            requests.num_output_tokens[request] = max(0, requests.max_tokens[request] - lacking)
            if requests.num_output_tokens[request]:
                requests.last_token_s[request] = self.start_s - delay_s
                self._delayed_s -= delay_s
            elif request in self.newly_joined:
                self.newly_joined.remove(request)
        else:
            self.used_blocks -= -(-num_computed // self._block_size)
        self.free_to_cache(request, 0)
        requests.num_preemptions[request] += 1
        self.waiting.insert(self._passed, request)
        return before - self.used_blocks

    def num_generated(self, request: int) -> int:
        """Tokens that a request has got so far, of an unfinished stretch none."""
        lacking = self.tokens_left(request)
        if lacking is None:
            return self._requests.num_output_tokens[request]
        return max(0, self._requests.max_tokens[request] - lacking)

    def abort(self, request: int) -> None:
        """
        Take an unfinished request out and give back its blocks, between two steps.

        A request whose KV cache is being pulled must not be aborted: the blocks would still arrive.
        """
        if request in self.running:
            self._stop(request)
            num_computed = self.prefilling.pop(request, None)
            if num_computed is None:
                self.leave(request)
                if request in self.newly_joined:
                    self.newly_joined.remove(request)
            else:
                self.used_blocks -= -(-num_computed // self._block_size)
            if self._rules.kv_reserved_fraction:
                self._final_blocks -= self._blocks_at_end(request)
            self.free_to_cache(request, 0)
        else:
            self._passed -= self.waiting.index(request) < self._passed
            self.waiting.remove(request)
            self.remote_prefills.discard(request)

    def drop_pull(self, request: int) -> None:
        """Give back the blocks of a request whose KV cache will not come."""
        del self.waiting_for_kv[request]
        num_tokens = self._requests.num_prompt_tokens[request]
        self.used_blocks -= -(-num_tokens // self._block_size)

    def update_from_output(self, end_s: float) -> list[int]:
        """Count the prompt tokens of a step that is over; return requests that end with it."""
        finished: list[int] = []
        for request, num_new_tokens in self.scheduled_prefills:
            num_computed = self.prefilling[request] + num_new_tokens
            if self.offload is not None:
                self.offload.store(request, num_computed)
            if num_computed < self._num_tokens(request):
                self.prefilling[request] = num_computed
                continue
            del self.prefilling[request]
            if self.prefill_only:
                self._stop(request)
                finished.append(request)
            elif self._append_token(request, num_computed, end_s):
                finished.append(request)
        return finished

    def _append_token(self, request: int, num_computed: int, end_s: float) -> bool:
        """Append the token that a finished prompt gives; return whether it was the last one."""
        requests = self._requests
        requests.num_output_tokens[request] += 1
        remaining = requests.max_tokens[request] - requests.num_output_tokens[request]
        if requests.num_output_tokens[request] == 1:
            requests.first_token_s[request] = end_s
        else:
            gap_s = end_s - requests.last_token_s[request]
            self.note_gaps(gap_s, 1, requests.last_token_s[request])
            requests.stall_s[request] = max(requests.stall_s[request], gap_s)
        if remaining:
            self.join(request, num_computed, remaining)
            return False
        self.used_blocks -= -(-num_computed // self._block_size)
        self.finish([request], end_s)
        return True

    def finish(self, finished: list[int], end_s: float) -> None:
        """Take finished requests off the running ones."""
        requests = self._requests
        for request in finished:
            self._stop(request)
            if self._rules.kv_reserved_fraction:
                self._final_blocks -= self._blocks_at_end(request)
            requests.finished_s[request] = end_s
            num_tokens = requests.num_prompt_tokens[request] + requests.max_tokens[request]
            self.free_to_cache(request, num_tokens - 1)

    def free_to_cache(self, request: int, num_tokens: int) -> None:
        """Leave the blocks of *num_tokens* of a request to the prefix cache."""
        if self.offload is not None and num_tokens:
            self.offload.store(request, num_tokens)
        if self.prefix_cache is not None:
            self.prefix_cache.free(request, num_tokens, self._num_blocks - self.used_blocks)
