"""From the options of a training run to job, layout and machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.specs.model import ModelSpec
from minicluster.specs.scenario import ClusterChoice
from sizing import catalog
from sizing.training.estimate import Interruptions
from sizing.training.job import TrainingJob, TrainingLayout
from sizing.training.options import TrainingOptions
from sizing.training.search import best_choice
from sizing.training.step import TrainingMachine

if TYPE_CHECKING:
    from minicluster.specs.cluster import ClusterSpec

PLAIN_RATIO = 4
"""Feed-forward over hidden size of a plain (GPT) feed-forward; gated ones take two thirds."""
SHAPE = ("layers", "hidden", "heads", "ffn", "vocab")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest(TrainingOptions):
    """A training scenario: what follows from its keys."""

    def layout(self) -> TrainingLayout:
        """
        Return the degrees, dp from the GPUs where it is not given.

        Raises:
            InputError: they do not multiply to the GPUs.
        """
        inner = self.tp * self.pp * self.cp
        dp = self.dp
        if dp is None:
            if self.gpus is None:
                raise InputError("gpus", None, "a number of GPUs, or dp")
            if self.gpus % inner:
                raise InputError("gpus", self.gpus, f"a multiple of tp x pp x cp = {inner}")
            dp = self.gpus // inner
        elif self.gpus not in (None, inner * dp):
            raise InputError("gpus", self.gpus, f"tp x pp x cp x dp = {inner * dp}")
        return TrainingLayout(
            tp=self.tp, pp=self.pp, cp=self.cp, dp=dp, ep=self.ep,
            micro_batch=self.micro_batch or 1, interleave=self.interleave or 1,
        )  # fmt: skip

    def job(self, layout: TrainingLayout) -> TrainingJob:
        """Return what is trained, with what follows from the model's family and the layout."""
        model = self._model()
        family = self.family or ("llama" if model.gated_mlp else "gpt")
        gpt = family == "gpt"
        # A GPU from before fp8 is older than flash attention.
        old = gpt and "fp8" not in self.machine().gpu.peak_flops_per_s
        sliced = layout.tp > 1 and (not old or self.recompute == "selective")
        return TrainingJob(
            model=model,
            sequence_tokens=self.seq,
            batch_sequences=self.batch,
            family=family,
            recompute=self.recompute,
            attention=self.attention or ("materialised" if old else "flash"),
            sequence_parallel=sliced if self.sequence_parallel is None else self.sequence_parallel,
            zero=(0 if gpt else 2 if layout.pp > 1 else 3) if self.zero is None else self.zero,
            overlap_experts=bool(self.overlap_experts),
        )

    def settled(self, machine: TrainingMachine) -> tuple[TrainingJob, TrainingLayout]:
        """
        Return job and layout; micro-batch and chunks are chosen where they are not given.

        If no choice fits, one sequence at a time and one chunk.
        """
        layout = self.layout()
        job = self.job(layout)
        choice = best_choice(
            job, layout, machine, micro_batch=self.micro_batch, interleave=self.interleave
        )
        return job, layout if choice is None else choice.layout

    def machine(self) -> TrainingMachine:
        """
        Return GPU and cluster.

        Raises:
            InputError: neither is given, they contradict, or the cluster is too small.
        """
        gpus = self.gpus or self.tp * self.pp * self.cp * (self.dp or 1)
        gpu = None if self.gpu is None else catalog.find_gpu(self.gpu, place="gpu")
        if self.cluster is not None:
            cluster, _ = catalog.find_network(self.cluster, place="cluster")
            if gpu is not None and gpu.name != cluster.gpu:
                raise InputError("gpu", gpu.name, f"{cluster.gpu}, the GPU of {cluster.name}")
            gpu = catalog.find_gpu(cluster.gpu)
        elif gpu is not None:  # nodes as in its first preset without tiers, or in its first
            presets = [preset for preset in catalog.clusters().values() if preset.gpu == gpu.name]
            choice = ClusterChoice(gpu=gpu.name, gpus_per_node=8, max_gpus=8)
            plain = [preset for preset in presets if not preset.tiers] or presets
            cluster = plain[0] if plain else catalog.find_cluster(choice, place="cluster")
        else:
            raise InputError("gpu", None, "a GPU of the catalog, or a cluster preset")
        available = cluster.tiers[-1].gpus if cluster.tiers else gpus
        if gpus > available:
            raise InputError(
                "gpus",
                gpus,
                f"at most the {available} GPUs of {cluster.name}: {gpus - available} fewer",
            )
        cluster = replace(cluster, max_gpus=max(cluster.max_gpus, gpus))
        return TrainingMachine(gpu=gpu, cluster=cluster)

    def interruptions(self, cluster: ClusterSpec) -> Interruptions | None:
        """Return failures and checkpoints; `None` where no checkpoint is given."""
        if self.checkpoint_s is None:
            return None
        mtbf = self.gpu_mtbf_s
        if mtbf is None and cluster.failures is not None:
            mtbf = cluster.failures.gpu_mtbf_s
        if mtbf is None:
            raise InputError(
                "gpu_mtbf_s", None, f"a number: cluster {cluster.name} has no [failures]"
            )
        return Interruptions(
            gpu_mtbf_s=mtbf, checkpoint_s=self.checkpoint_s, restart_s=self.restart_s
        )

    def _model(self) -> ModelSpec:
        shape = {name: getattr(self, name) for name in SHAPE}
        if self.model is not None:
            beside = [name for name, value in shape.items() if value is not None]
            if beside:
                raise InputError(
                    beside[0], shape[beside[0]], "no such option beside a model's name"
                )
            model = catalog.find_model(self.model, place="model")
            return replace(
                model, weight_dtype=self.dtype, dtype="bf16",
                max_context_tokens=max(model.max_context_tokens, self.seq),
            )  # fmt: skip
        missing = [name for name, value in shape.items() if value is None]
        if missing:
            raise InputError(missing[0], None, "a number, or a model of the catalog")
        return self._shaped(**shape)

    def _shaped(self, *, layers: int, hidden: int, heads: int, ffn: int, vocab: int) -> ModelSpec:
        if self.head_dim is None and hidden % heads:
            raise InputError("heads", heads, f"a divisor of hidden = {hidden}, or a head_dim")
        gpt = self.family == "gpt" or (self.family is None and ffn == PLAIN_RATIO * hidden)
        return ModelSpec(
            id="given",
            source="given",
            config_hash="",
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self.kv_heads or heads,
            head_dim=self.head_dim or hidden // heads,
            ffn_size=ffn,
            vocab_size=vocab,
            max_context_tokens=self.seq,
            gated_mlp=not gpt,
            tied_embeddings=gpt,
            weight_dtype=self.dtype,
        )
