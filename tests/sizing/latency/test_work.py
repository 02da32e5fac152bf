"""Work and bytes sent by every architecture of the catalog, sliced every way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicluster.specs.model import MoeSpec
from minicluster.specs.parameters import num_active_parameters
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.latency.communication import step_exchanges
from sizing.latency.op import decode_load, keys_in_reach, pairs, prefill_load
from sizing.latency.work import (
    busiest_share,
    experts_touched,
    packed_share,
    popularity_cumulants,
    step_ops,
)

MODELS = tuple(catalog.models())
SLICINGS = [
    Slicing(tp=tp, dp=dp, ep=ep)
    for tp in (1, 2, 8) for dp in (1, 2, 8) for ep in (1, 2, 16) if (tp * dp) % ep == 0
]  # fmt: skip
WHOLE = {"q and kv down", "kv down", "index q", "index k", "moe router", "norm", "index prefill",
         "index decode"}  # fmt: skip
"""Ops that every GPU of a copy of attention does whole."""


def test_down_projections_of_one_input_are_one_gemm() -> None:
    """DeepSeek-V3's of queries, keys and values: 7,168 by 1,536 + 512 + 64."""
    ops = step_ops(catalog.find_model("deepseek-v3"), decode_load(8, 100), slicing=Slicing())
    down = {op.name: (op.inner, op.columns) for op in ops if op.name.endswith(" down")}
    assert down["q and kv down"] == (7168, 1536 + 512 + 64)
    assert "kv down" not in down


@pytest.mark.parametrize("name", MODELS)
def test_flops_per_token(name: str) -> None:
    """
    A prompt's GEMMs are 2 FLOPs per token and active parameter, lm_head once; scores 4 N H pairs.

    Norms and biases are parameters without a GEMM, at most 0.2 %.
    """
    model, tokens = catalog.find_model(name), 1000
    ops = step_ops(model, prefill_load(tokens), slicing=Slicing())
    gemms = sum(float(op.total.flops) for op in ops if "gemm" in op.kind and op.name != "lm_head")
    head = model.vocab_size * model.hidden_size
    assert [float(op.total.flops) for op in ops if op.name == "lm_head"] == [2 * head]
    assert gemms == pytest.approx(2 * tokens * (num_active_parameters(model) - head), rel=2e-3)
    scores = sum(float(op.total.flops) for op in ops if op.kind == "prefill attention")
    pair = tokens * (tokens + 1) / 2
    if not model.mla:
        windows = float(pairs(np.array(1000.0), np.array(0.0), model.window_tokens))
        seen = model.num_full_layers * pair + model.num_window_layers * windows
        assert scores == pytest.approx(4 * model.num_heads * model.head_dim * seen)
    elif not model.index:
        width = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim + model.mla.v_head_dim
        assert scores == pytest.approx(model.num_layers * 2 * model.num_heads * width * pair)


@given(name=st.sampled_from(MODELS), slicing=st.sampled_from(SLICINGS), tokens=st.integers(1, 5000))
def test_slicing_loses_no_flop_and_no_byte(name: str, slicing: Slicing, tokens: int) -> None:
    """
    All GPUs of a stage together do the FLOPs of one GPU that holds the tokens of all copies.

    Exactly, but for ops that each GPU does whole, KV heads that do not divide, heads that sparse
    kernels pad, and the busiest group of experts, all of which do more; never fewer bytes. A
    request meets every layer once, on however many pipeline stages they lie.
    """
    model = catalog.find_model(name)
    gpus = slicing.tp * slicing.dp
    staged = step_ops(model, prefill_load(tokens), slicing=replace(slicing, pp=2))
    assert staged == step_ops(model, prefill_load(tokens), slicing=slicing)
    for load, all_copies in (
        (prefill_load(tokens), replace(prefill_load(tokens), prompts=np.array(slicing.dp))),
        (decode_load(7, tokens), decode_load(7 * slicing.dp, tokens)),
    ):
        one = {op.name: op for op in step_ops(model, all_copies, slicing=Slicing())}
        for part in step_ops(model, load, slicing=slicing):
            done, wanted = gpus * float(part.total.flops), float(one[part.name].total.flops)
            assert done >= wanted * (1 - 1e-9)
            more = part.name in WHOLE or "expert" in part.name or part.name == "qkv"
            more = more or part.name.startswith("sparse attention")
            if not more:
                assert done == pytest.approx(wanted)
            moved = gpus * float(part.total.hbm_bytes)
            assert moved >= float(one[part.name].total.hbm_bytes) * (1 - 1e-9)


def test_bytes_of_experts_and_of_several_prompts_by_hand() -> None:
    """A token reads its two experts and its activations; two prompts move twice the scores."""
    model, (h, f) = catalog.find_model("mixtral-8x7b"), (4096, 14_336)
    ops = {op.name: op for op in step_ops(model, decode_load(1, 10), slicing=Slicing())}
    assert float(ops["experts up"].work.hbm_bytes) == 2 * (2 * h * 2 * f + 2 * (h + 2 * f))
    assert float(ops["experts down"].work.hbm_bytes) == 2 * (2 * h * f + 2 * (h + f))
    one, two = (
        {op.name: float(op.work.hbm_bytes) for op in step_ops(model, load, slicing=Slicing())}
        for load in (prefill_load(50), replace(prefill_load(50), prompts=np.array(2.0)))
    )
    assert two["attention prefill"] == 2 * one["attention prefill"]


@given(
    experts=st.sampled_from((8, 128, 512)),
    k=st.integers(1, 8),
    tokens=st.integers(1, 10_000),
    groups=st.sampled_from((1, 2, 8)),
)
def test_more_tokens_touch_no_fewer_experts(experts: int, k: int, tokens: int, groups: int) -> None:
    one, few, more = (
        float(experts_touched(experts, k, np.array(float(n)))) for n in (1, tokens, tokens + 1)
    )
    assert one == pytest.approx(k)
    assert one <= few <= more <= experts
    moe = MoeSpec(num_experts=experts, experts_per_token=k, expert_ffn_size=1)
    share = float(busiest_share(moe, np.array(float(tokens)), groups=groups))
    assert 1 <= share <= groups


@pytest.mark.parametrize("tokens", [64, 32_768])
@pytest.mark.parametrize(
    ("experts", "groups"), [(256, 2), (256, 8), (256, 16), (256, 32), (256, 64), (288, 72)]
)
def test_the_busiest_group_by_simulation(experts: int, groups: int, tokens: int) -> None:
    """The mean rows of the busiest group are those of experts whose loads are drawn."""
    rng, rows = np.random.default_rng(7), 8 * tokens
    loads = (1 - (1 - 200.0**-0.01) * rng.random((4000, experts))) ** (1 / -0.01)
    shares = loads.reshape(4000, groups, -1).sum(axis=2) / loads.sum(axis=1)[:, None]
    found = rng.multinomial(rows, shares).max(axis=1).mean() * groups / rows
    moe = MoeSpec(num_experts=experts, experts_per_token=8, expert_ffn_size=1)
    predicted = float(busiest_share(moe, np.array(float(tokens)), groups=groups))
    assert predicted == pytest.approx(found, rel=0.025)


@pytest.mark.parametrize(("experts", "groups"), [(256, 8), (256, 32), (256, 64), (128, 16)])
def test_balanced_experts_are_packed_evenly(experts: int, groups: int) -> None:
    """Moved experts even the groups out, but for one more popular than a group; copies do that."""
    loads = (1 - (1 - 200.0**-0.01) * (np.arange(experts) + 0.5) / experts) ** (1 / -0.01)
    most = loads.max() / loads.mean() * groups / experts
    by_chance = np.random.default_rng(1).permuted(np.tile(loads, (500, 1)), axis=1)
    rows = by_chance.reshape(500, groups, -1).sum(axis=2)
    moved, copied = packed_share(experts, 0, groups), packed_share(experts, groups, groups)
    assert max(1.0, most) <= moved < 1.02 * max(1.0, most)
    assert 1 <= copied < 1.04
    assert moved < 0.8 * rows.max(axis=1).mean() / rows.mean()


@pytest.mark.parametrize("tokens", [64, 32_768])
def test_the_busiest_group_of_balanced_experts_by_simulation(tokens: int) -> None:
    """What is left are the groups' packed loads, and the chance of which experts tokens visit."""
    moe = MoeSpec(num_experts=256, experts_per_token=8, expert_ffn_size=1, redundant_experts=32)
    rows, shares = 8 * tokens, np.full(32, 1 / 32)
    found = np.random.default_rng(7).multinomial(rows, shares, size=4000).max(axis=1).mean()
    predicted = float(busiest_share(moe, np.array(float(tokens)), groups=32))
    packed = packed_share(256, 32, 32)
    assert found * 32 / rows < predicted < 1.01 * packed * found * 32 / rows


def test_cumulants_of_an_experts_load_by_quadrature() -> None:
    loads = (1 - (1 - 200.0**-0.01) * (np.arange(100_000) + 0.5) / 100_000) ** (1 / -0.01)
    off = loads / loads.mean() - 1
    second, third, fourth = ((off**power).mean() for power in (2, 3, 4))
    found = (second, third, fourth - 3 * second**2)
    assert popularity_cumulants(1.01, 200.0) == pytest.approx(found, rel=1e-3)
    assert popularity_cumulants(1.01, 1.0) == (0, 0, 0)


@given(n=st.integers(1, 60), p=st.integers(0, 60), chunk=st.integers(1, 80))
def test_pairs(n: int, p: int, chunk: int) -> None:
    """Pairs of full, windowed and chunked attention are those that counting finds (eq. W2)."""
    arrays = np.array([float(n)]), np.array([float(p)])
    assert pairs(*arrays) == sum(p + i for i in range(1, n + 1))
    assert pairs(*arrays, chunk) == sum(min(chunk, p + i) for i in range(1, n + 1))
    assert pairs(*arrays, chunk, chunked=True) == sum((p + i) % chunk + 1 for i in range(n))
    assert keys_in_reach(np.array(3.0 * chunk), chunk, chunked=True) == (chunk + 1) / 2


def bytes_at(name: str, contexts: tuple[int, int], tp: int) -> list[dict[str, float]]:
    """Return the bytes of each op of decode steps at two contexts."""
    model, slicing = catalog.find_model(name), Slicing(tp=tp)
    return [
        {op.name: float(op.total.hbm_bytes)
         for op in step_ops(model, decode_load(8, context), slicing=slicing)}
        for context in contexts
    ]  # fmt: skip


def test_what_a_longer_context_does_not_cost() -> None:
    """
    An index limits the keys of GLM-5, a linear state of Qwen3.5 is as large however long.

    Beyond 2,048 keys the scores cost the same, while the index keeps growing (eq. W9); a state is
    read and written, whatever the context (eq. W10).
    """
    short, long = bytes_at("glm-5", (2048, 16_384), tp=1)
    assert long["sparse attention decode"] == short["sparse attention decode"]
    assert long["index decode"] > 7 * short["index decode"]
    short, long = bytes_at("qwen3.5-397b-a17b", (100, 10_000), tp=8)
    assert short["linear decode"] == long["linear decode"] == 45 * 2 * 8 * 8 * 128 * 128 * 4
    assert long["attention decode"] > 50 * short["attention decode"]


def sizes(
    name: str, slicing: Slicing, *, sends_to_experts: bool = False
) -> dict[str, tuple[int, int, int, float]]:
    """Return group, stride, repeats and bytes of each exchange of a step of 100 tokens."""
    model, load = catalog.find_model(name), decode_load(100, 50)
    exchanges = step_exchanges(model, load, slicing=slicing, sends_to_experts=sends_to_experts)
    assert len({one.name for one in exchanges}) == len(exchanges)
    return {
        one.name: (one.group, one.stride, one.repeats, float(one.size_bytes)) for one in exchanges
    }


def test_tokens_go_to_their_experts_alone() -> None:
    """
    Eight experts a token: all to all with 32 groups of them, but not with eight (X5).

    fp8 there and 16 bits back, whatever the number of groups.
    """
    few, wide, wider = (
        sizes("deepseek-v3", Slicing(dp=n, ep=n), sends_to_experts=True) for n in (8, 32, 64)
    )
    assert few == sizes("deepseek-v3", Slicing(dp=8, ep=8))
    assert "expert gather" not in wide
    assert wide["expert dispatch"] == (32, 1, 58, 8 * 100 * 7168)
    assert wide["expert combine"] == (32, 1, 58, 8 * 100 * 7168 * 2)
    assert wider["expert combine"][3] == wide["expert combine"][3]


def test_exchanges() -> None:
    """
    Groups, strides, repeats and bytes by hand.

    Two all-reduces a layer, one where attention and feed-forward stand side by side (X1). Copies
    of attention gather and scatter, each GPU its share, which tp GPUs rejoin (X2). A norm over all
    heads sums squares (X3). Hidden state and residual go to the next stage, a slice from each GPU
    (X4).
    """
    assert sizes("llama-3.1-70b", Slicing()) == {}
    dense = sizes("llama-3.1-70b", Slicing(tp=8))
    assert dense["attention all-reduce"] == (8, 1, 80, 100 * 8192 * 2)
    assert dense["ffn all-reduce"] == (8, 1, 80, 100 * 8192 * 2)
    assert dense["logits gather"] == (8, 1, 1, 100 * 128_256 * 2)
    side_by_side = sizes("falcon-180b", Slicing(tp=8))
    assert "attention all-reduce" not in side_by_side
    assert side_by_side["ffn all-reduce"][2] == 80
    assert sizes("mixtral-8x7b", Slicing(tp=8, ep=8)) == sizes("mixtral-8x7b", Slicing(tp=8))
    few = sizes("deepseek-v3", Slicing(dp=8, ep=8))
    assert few["expert gather"] == few["expert scatter"] == (8, 1, 58, 8 * 100 * 7168 * 2)
    assert "expert rejoin" not in few
    both = sizes("deepseek-v3", Slicing(tp=2, dp=4))
    assert both["expert rejoin"] == (2, 1, 58, 100 * 7168 * 2)
    assert both["ffn all-reduce"][2] == 3
    staged = sizes("llama-3.1-70b", Slicing(tp=4, pp=3))
    assert staged["stage send"] == (2, 4, 2, 2 * 100 * 8192 * 2 / 4)
    assert staged["stage gather"] == (4, 1, 2, 2 * 100 * 8192 * 2)
    assert sizes("minimax-m2.5", Slicing(tp=8))["query norm all-reduce"] == (8, 1, 62, 100 * 8)
    for name, normed in (("qwen3-32b", True), ("llama-3.1-70b", False)):
        ops = step_ops(catalog.find_model(name), decode_load(4, 100), slicing=Slicing(tp=8))
        assert ("query norm" in {op.name for op in ops}) == normed
        assert "query norm all-reduce" not in sizes(name, Slicing(tp=8))


def test_popular_experts_by_their_law() -> None:
    """
    Loads fall as a power law over a range of 12, of middles of 16 equal shares of the experts.

    Rank r of the law's continuous form has the load (1 + (12^p - 1) r)^(1/p), p = 1 - 1.01.
    """
    power, middle = 1 - 1.01, (np.arange(16) + 0.5) / 16
    loads = np.array([(1 + (12**power - 1) * rank) ** (1 / power) for rank in middle])
    loads /= loads.mean()
    assert loads.max() / loads.min() == pytest.approx(12, rel=0.2)
    for tokens in (4.0, 100.0):
        expected = 256 * np.mean(1 - (1 - 8 / 256) ** (loads * tokens))
        assert float(experts_touched(256, 8, np.array(tokens))) == pytest.approx(expected)


def test_no_group_is_less_busy_than_the_mean() -> None:
    """One token goes to as few groups as it can; many, to experts alike, load all groups alike."""
    moe = MoeSpec(num_experts=64, experts_per_token=8, expert_ffn_size=1, redundant_experts=0)
    for tokens in (1.0, 1e6, 1e12):
        assert float(busiest_share(moe, np.array(tokens), groups=8)) >= 1


@pytest.mark.parametrize(("groups", "most"), [(2, 2), (4, 4), (8, 4)])
def test_few_rows_reach_as_many_groups_as_a_token_has_experts(groups: int, most: int) -> None:
    """Of 8 experts a token visits 2: of 8 groups at least a quarter, at most all of its rows."""
    moe = catalog.find_model("mixtral-8x7b").moe
    assert moe is not None
    shares = busiest_share(moe, np.array([0.1, 1.0, 10.0, 1e6]), groups=groups)
    assert shares.max() <= most
    assert groups < 4 or shares[0] == most
    assert shares.tolist() == sorted(shares, reverse=True)
