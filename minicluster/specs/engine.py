"""Engine profiles: what a version can deploy, how it schedules, and its fixed times."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from minicluster.errors import InputError
from minicluster.specs.checks import Count, Fraction, NotNegative, Spec, Whole, choice
from minicluster.specs.efficiency import EngineKernels
from minicluster.specs.gpu import AllToAllLibrary, NumberSource
from minicluster.specs.lora import LoraSpec

if TYPE_CHECKING:
    from minicluster.specs.gpu import GpuSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(Spec):
    """
    Settings of an engine that are chosen, not measured; with the defaults it has none of them.

    A profile and a plan's engine are options and more, so that their files stay flat; a
    scheduler's limits hold them. A scenario has a key of each name.

    Attributes:
        chunked_prefill_tokens: most tokens of one prompt in a step
            (`long_prefill_token_threshold`); 0: the token budget.
        speculative_tokens: k, tokens that the draft head drafts for each sequence and step; 0:
            none.
        mean_accepted_tokens: of these, accepted on average; the token that a step gives anyway is
            not counted.
        two_batch_overlap: steps are split in two halves whose communication and compute overlap.
        watermark_fraction: share of the KV blocks that stays free while a request is admitted
            beside others (vLLM's `watermark`).
    """

    _TABLE: ClassVar[str] = "engine"

    chunked_prefill_tokens: Whole = 0
    speculative_tokens: Whole = 0
    mean_accepted_tokens: NotNegative = 0.0
    two_batch_overlap: bool = False
    watermark_fraction: NotNegative = 0.0

    def _check(self) -> None:
        if self.mean_accepted_tokens > self.speculative_tokens:
            expected = f"at most speculative_tokens = {self.speculative_tokens}"
            raise InputError(
                self._place("mean_accepted_tokens"), self.mean_accepted_tokens, expected
            )

    @property
    def options(self) -> EngineOptions:
        """The options alone, of what has more."""
        return EngineOptions(**{name: getattr(self, name) for name in OPTIONS})


OPTIONS = tuple(each.name for each in fields(EngineOptions))
COMMON_OPTIONS = (
    "chunked_prefill_tokens", "speculative_tokens", "mean_accepted_tokens", "two_batch_overlap",
)  # fmt: skip
"""Options that a profile has rules of its own for; others have to be among its `own_options`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRules(Spec):
    """
    Rules in which engines differ; the defaults are vLLM's, with a step scheduled after the last.

    Attributes:
        mixed_steps, chunked_prefill, kv_reserved_fraction: see `SchedulingRules`.
        one_kv_pool: whether all kinds of layers share one pool of blocks; see `kv_pages`.
        scheduled_ahead: the next step is scheduled while one runs: a request that arrives during a
            step joins the one after the next.
        receive_steps: decode steps from one look at new requests to the next; a step that holds
            prompts is followed by a look at once, as in SGLang's `scheduler_recv_skipper.py`.
        wait_steps: most steps that prompts wait for others while sequences decode.
        wait_fraction: share of the token budget that, once filled, ends the wait.
    """

    mixed_steps: bool = True
    chunked_prefill: bool = True
    kv_reserved_fraction: NotNegative = 0.0
    one_kv_pool: bool = True
    scheduled_ahead: bool = False
    receive_steps: Count = 1
    wait_steps: Whole = 0
    wait_fraction: NotNegative = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingRules(Spec):
    """
    `[scheduling]` of an engine profile: how the engine fills a step.

    Versions are tuples of their release numbers.

    Attributes:
        mixed_steps: prompts are computed in the same step as decoded tokens, which come first;
            else waiting prompts get steps of their own, and decoding pauses.
        chunked_prefill: a prompt that does not fit the rest of the token budget is begun and
            continued in the next step; else it waits for a step with room, and a prompt of any
            size has a step alone.
        kv_reserved_fraction: share of a request's output tokens whose KV cache has to be free
            before the request is admitted.
        fp8_kv: models whose KV cache is fp8 unless the row says otherwise. `small`: every model
            with weights of 8 bits or less. `requantised`: those of them that are published in
            wider weights (ModelOpt writes the scales of an fp8 cache with the weights'), but not
            where weights are scaled in blocks, because those checkpoints carry no such scales.
        async_scheduling_since: first version that by default prepares the next step while one
            runs.
        split_since: first version that serves prefill and decode apart; empty: every version. A
            row of split pools with a lower version names the version of the server around the
            engine (Dynamo), which says nothing of the engine's.
    """

    _TABLE: ClassVar[str] = "scheduling"

    mixed_steps: bool
    chunked_prefill: bool
    kv_reserved_fraction: NotNegative
    fp8_kv: Annotated[str, choice("small", "requantised")]
    async_scheduling_since: tuple[int, ...]
    split_since: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDefaults(Spec):
    """
    `[[defaults]]` of an engine profile: what the engine sets otherwise on some devices.

    Attributes:
        kind: `gpu` or `cpu`.
        from_bytes: least memory of such a GPU.
        except_gpus: GPUs left out: those whose name holds one of these words.
        block_size: in place of the profile's, like the next two; `None`: the profile's.
    """

    _TABLE: ClassVar[str] = "defaults[]"

    kind: Annotated[str, choice("gpu", "cpu")] = "gpu"
    from_bytes: NotNegative = 0.0
    except_gpus: tuple[str, ...] = ()
    block_size: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None

    def apply_to(self, gpu: GpuSpec) -> bool:
        """Say whether *gpu* is such a device."""
        if gpu.kind != self.kind or any(word in gpu.name for word in self.except_gpus):
            return False
        return gpu.kind == "cpu" or gpu.require("hbm_bytes") >= self.from_bytes


DEVICE_SETTINGS = ("block_size", "max_num_seqs", "max_num_batched_tokens")
"""Settings whose defaults depend on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile(EngineOptions):
    """
    One engine version with one KV connector: the rules that a deployable plan keeps.

    Attributes:
        pp: pipeline degrees that can be deployed.
        block_size: tokens of a KV block; the engine takes multiples of it.
        activation_bytes: working memory per GPU at `max_num_batched_tokens`; 0: as vLLM allocates
            it, by the model (docs/model.md, eq. M8).
        logit_bytes: peak memory of sampling per logit of a full batch; needed where
            `activation_bytes` is 0.
        sorted_logit_bytes: the same of versions that sort the logits; needed beside
            `sorts_logits_until`.
        sorts_logits_until: first version that does not.
        runtime_bytes: CUDA context and graphs per GPU; buffers of collectives are counted apart.
        max_num_batched_tokens: token budget of a step.
        defaults: block size and limits that the engine has on other devices, the last one counts;
            `on` applies them.
        per_layer_s: launch and host time per layer and step, not hidden.
        prompt_expert_layer_s: per layer with experts of a step that holds prompts: such steps are
            not captured whole, and experts take many kernels.
        captured_tokens: steps of at most this many tokens are captured all the same.
        prompt_compile_s: per step that holds prompts of a model with gated delta layers, one of
            whose kernels is compiled for each number of tokens that a step has not had before.
        prompt_compile_until: first version that compiles this kernel once.
        per_exchange_s: time per collective and step beyond that of its kernel in a CUDA graph.
        per_step_s: scheduler and sampler per step.
        per_sequence_s: host time per sequence and step.
        exposed_step_s: host time between two steps of versions that do not prepare the next one
            while one runs, beyond `per_step_s`.
        exposed_sequence_s: of these versions, per sequence and step beyond `per_sequence_s`.
        per_token_stream_s: of the process that turns tokens into text and sends them, beside the
            steps: no step of many sequences ends sooner. 0: several processes, or not known.
        per_request_s: API server, tokenisation and routing, once per request.
        transfer_base_s: fixed part of one KV pull.
        transfer_per_descriptor_s: per contiguous piece of KV cache in a pull: a block of a layer.
        deployable: whether `serving up` deploys it; others are planned and exported.
        window_per_query_head: whether decode attention with a window reads keys and values once per
            query head, as kernels do that know no shared heads.
        one_kv_pool: whether all kinds of layers share one pool of blocks (`kv_pages`); else each
            has its own.
        sends_to_experts: tokens go to the groups of their experts alone where these are more than
            the experts of a token, instead of to all groups.
        all_to_all_libraries: libraries that may send the tokens to the groups of their experts in
            place of the engine's own way.
        overlap_decode_tokens: tokens of a rank from which two-batch overlap splits a step that only
            decodes; 0: the engine has none.
        overlap_prompt_tokens: the same of a step with prompts.
        kernels: of this version, on every GPU, in place of those that the GPU lists.
        own_options: names of `EngineOptions` that not every engine has.
        draft_methods: of speculative decoding that the engine knows, see `DraftSpec`; empty: none.
        draft_overhead_fraction: of a decode step with drafts, added to it: the host's work between
            the draft head and the model that is not hidden behind the GPU's.
        all_to_all: the library that is used; `None`: the engine's own way.
    """

    _TABLE: ClassVar[str] = ""

    name: str
    version: str
    connector: str
    pp: tuple[int, ...]
    block_size: Count
    gpu_memory_utilization: Fraction
    activation_bytes: NotNegative
    runtime_bytes: NotNegative
    logit_bytes: NotNegative = 0.0
    sorted_logit_bytes: NotNegative = 0.0
    sorts_logits_until: tuple[int, ...] = ()
    max_num_seqs: Count
    max_num_batched_tokens: Count
    per_layer_s: NotNegative
    per_step_s: NotNegative
    per_sequence_s: NotNegative
    exposed_step_s: NotNegative = 0.0
    exposed_sequence_s: NotNegative = 0.0
    per_token_stream_s: NotNegative = 0.0
    per_request_s: NotNegative
    transfer_base_s: NotNegative
    scheduling: SchedulingRules
    defaults: tuple[DeviceDefaults, ...] = ()
    per_exchange_s: NotNegative = 0.0
    prompt_expert_layer_s: NotNegative = 0.0
    captured_tokens: Whole = 0
    prompt_compile_s: NotNegative = 0.0
    prompt_compile_until: tuple[int, ...] = ()
    transfer_per_descriptor_s: NotNegative = 0.0
    deployable: bool = True
    window_per_query_head: bool = False
    one_kv_pool: bool = False
    sends_to_experts: bool = False
    all_to_all_libraries: tuple[str, ...] = ()
    overlap_decode_tokens: Whole = 0
    overlap_prompt_tokens: Whole = 0
    kernels: EngineKernels | None = None
    own_options: tuple[str, ...] = ()
    draft_methods: tuple[str, ...] = ()
    draft_overhead_fraction: NotNegative = 0.0
    all_to_all: AllToAllLibrary | None = None
    lora: LoraSpec | None = None
    sources: tuple[NumberSource, ...] = ()

    @property
    def label(self) -> str:
        """Name, version and connector of the profile."""
        connector = () if self.connector == "none" else (self.connector,)
        return "-".join((self.name, self.version, *connector))

    def _check(self) -> None:
        EngineOptions._check(self)  # noqa: SLF001  (super() knows no class with slots)
        if not (self.activation_bytes or self.logit_bytes):
            expected = "a number above 0 where activation_bytes is 0"
            raise InputError(self._place("logit_bytes"), self.logit_bytes, expected)
        if self.sorts_logits_until and not self.sorted_logit_bytes:
            expected = "a number above 0 beside sorts_logits_until"
            raise InputError(self._place("sorted_logit_bytes"), self.sorted_logit_bytes, expected)

    @property
    def prompt_tokens_per_step(self) -> int:
        """Most tokens of one prompt in a step."""
        return self.chunked_prefill_tokens or self.max_num_batched_tokens

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens per sequence and decode step."""
        return 1.0 + self.mean_accepted_tokens

    def rules(self, *, ahead: bool) -> EngineRules:
        """Return how its scheduler fills steps; *ahead*: it does so while one runs."""
        return EngineRules(
            mixed_steps=self.scheduling.mixed_steps,
            chunked_prefill=self.scheduling.chunked_prefill,
            kv_reserved_fraction=self.scheduling.kv_reserved_fraction,
            one_kv_pool=self.one_kv_pool,
            scheduled_ahead=ahead,
        )

    def on(self, gpu: GpuSpec) -> EngineProfile:
        """
        Return the profile with the block size and the limits that the engine has on *gpu*.

        As in vLLM, no more sequences run than a step has tokens, drafts included.
        """
        settings = {name: getattr(self, name) for name in DEVICE_SETTINGS}
        for default in self.defaults:
            if default.apply_to(gpu):
                values = {name: getattr(default, name) for name in DEVICE_SETTINGS}
                settings |= {name: value for name, value in values.items() if value is not None}
        sequences = max(1, settings["max_num_batched_tokens"] // (1 + self.speculative_tokens))
        settings["max_num_seqs"] = min(settings["max_num_seqs"], sequences)
        return replace(self, defaults=(), **settings)
