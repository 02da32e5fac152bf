"""All to all by DeepEP, and two-batch overlap: closed forms, bounds, and what was published."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicluster.errors import InputError
from minicluster.specs.scenario import EngineChoice
from minicluster.specs.slicing import Slicing
from sizing import catalog
from sizing.catalog.engine import chosen_engine
from sizing.latency.collectives import exchange_s
from sizing.latency.communication import Exchange
from sizing.latency.memory import library_bytes
from sizing.latency.op import StepLoad, decode_load, pairs, prefill_load
from sizing.latency.step import step_s, step_table, step_terms
from sizing.latency.term import Machine, Term, overlapped

PUBLISHED: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[2] / "published" / "deepep.toml").read_text()
)
LIBRARY = catalog.collectives()["deepep"].all_to_all
WIDE = Slicing(dp=16, ep=16)


def machine(engine: str = "vllm", preset: str = "h100-8", *, overlap: bool = False) -> Machine:
    """Return DeepSeek-V3 with 32 copies of experts, whose tokens DeepEP sends."""
    assert LIBRARY is not None
    cluster = replace(catalog.clusters()[preset], max_gpus=256)
    gpu, model = catalog.find_gpu(cluster.gpu), catalog.find_model("deepseek-v3")
    assert model.moe is not None
    profile = next(each for each in catalog.engines() if each.name == engine).on(gpu)
    return Machine(
        model=replace(model, moe=replace(model.moe, redundant_experts=32)), gpu=gpu,
        cluster=cluster,
        engine=replace(profile, all_to_all=LIBRARY, two_batch_overlap=overlap),
    )  # fmt: skip


def both(load: StepLoad, slicing: Slicing, engine: str = "vllm") -> tuple[float, float]:
    """Return the seconds of a step without overlap and with it."""
    whole, split = (
        float(step_s(machine(engine, overlap=each), load, slicing=slicing))
        for each in (False, True)
    )
    return whole, split


def prompts(tokens: float, count: float) -> StepLoad:
    return replace(prefill_load(tokens), prompts=np.asarray(float(count)))


# --- DeepEP


def sent_s(ranks: int, tokens: int, width: int, *, once: bool) -> float:
    """Return the seconds of one dispatch or combine on H800."""
    exchange = Exchange(
        "", "X6", "all-to-all", ranks, 1, tokens * 7168.0 * width, library=LIBRARY, copies=8,
        once=once,
    )  # fmt: skip
    cluster = replace(catalog.clusters()["h800-8"], max_gpus=256)
    return float(exchange_s(exchange, catalog.find_gpu("h800"), cluster))


def reached(units: int) -> float:
    """Units that the 8 experts of a token are in, of so many."""
    return units * (1 - (1 - 1 / units) ** 8)


@pytest.mark.parametrize(("name", "width"), [("dispatch", 1), ("combine", 2)])
def test_low_latency_kernels_are_met(name: str, width: int) -> None:
    """Twelve points from 8 to 256 GPUs, of which one constant was taken, within 10 %."""
    known = PUBLISHED["low_latency"]
    for ranks, measured_us in zip(known["ranks"], known[f"{name}_us"], strict=True):
        predicted = sent_s(ranks, 128, width, once=False)
        assert predicted * 1e6 == pytest.approx(measured_us, rel=0.10), (name, ranks)


@pytest.mark.parametrize(("name", "width"), [("dispatch", 1), ("combine", 2)])
def test_normal_kernels_are_met_on_up_to_four_nodes(name: str, width: int) -> None:
    """Within 12 %; on eight nodes 4 of 8 groups of experts are fewer nodes than are counted."""
    assert LIBRARY is not None
    known = PUBLISHED["normal"]
    for ranks, per_s in zip(known["ranks"], known[f"{name}_gbytes_per_s"], strict=True):
        copies = reached(ranks) if ranks == 8 else reached(min(4, ranks // 8))
        scales = 1 + 1 / 32 if width == 1 else 1
        measured_s = 4096 * 7168 * width * scales * copies / (per_s * 1e9)
        error = (sent_s(ranks, 4096, width, once=True) - LIBRARY.prompt_latency_s) / measured_s - 1
        assert abs(error) < 0.12 or (ranks == 64 and 0.3 < error < 0.45), (name, ranks, error)


def test_a_gpu_gets_one_copy_in_steps_with_prompts() -> None:
    """Bytes by hand: r(16) over NVLink or r(2) between two nodes; each expert a copy in decode."""
    assert LIBRARY is not None
    here = machine()
    for load, once in ((prompts(1000, 1), True), (decode_load(1000.0, 10.0), False)):
        terms = {term.name: term for term in step_terms(here, load, slicing=WIDE)}
        own = 1000 * 7168 * 2.0
        links, network = 450e9 * 0.81, 50e9 * 0.92
        if once:
            slow = max(reached(16) * 7 / 8 / 180e9, reached(2) / 2 / network)
        else:
            slow = max(8 * 7 / 16 / links, 8 / 2 / network)
        fixed = LIBRARY.prompt_latency_s if once else LIBRARY.latency_s
        combine = terms["expert combine"]
        assert float(combine.seconds) == pytest.approx(58 * (fixed + own * slow))
        assert float(combine.launch_s) == pytest.approx(58 * fixed, rel=1e-4)
        assert combine.equation == "X6"


def test_ranks_without_whole_experts_do_not_use_it() -> None:
    """TP and sliced experts have the engine's own collectives, and never overlap."""
    for slicing in (Slicing(tp=8), Slicing(tp=8, ep=8), Slicing(dp=16)):
        own = replace(machine(), engine=replace(machine().engine, all_to_all=None))
        here = machine(overlap=True)
        load = prompts(2000, 3)
        assert step_terms(here, load, slicing=slicing) == step_terms(own, load, slicing=slicing)
        assert library_bytes(here.model, here.engine, slicing=slicing) == 0.0


def test_its_buffers_take_memory() -> None:
    """Low-latency buffers of 256 tokens and 288 experts: 4 x 288 x 256 messages; 2 GiB besides."""
    here = machine()
    engine = replace(here.engine, max_num_seqs=256)
    found = library_bytes(here.model, engine, slicing=WIDE)
    assert found == pytest.approx(2 * 2**30 + 4 * 288 * 256 * (7168 * 2 + 7168 / 32))
    drafted = replace(engine, max_num_seqs=128, speculative_tokens=1)
    assert library_bytes(here.model, drafted, slicing=WIDE) == found


def test_its_gpus_are_in_the_catalog() -> None:
    """Every name is of a GPU that a scenario can ask for."""
    assert LIBRARY is not None
    assert set(LIBRARY.gpus) <= set(catalog.gpus())


def test_engines_without_it_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: a profile that says nothing of libraries and overlap has neither."""
    profile = replace(
        catalog.find_engine(EngineChoice()), all_to_all_libraries=(), overlap_decode_tokens=0,
        overlap_prompt_tokens=0,
    )  # fmt: skip
    monkeypatch.setattr("sizing.catalog.engine.engines", lambda: (profile,))
    gpus = [catalog.find_gpu("h100-sxm")]
    for keys, said in (
        ({"two_batch_overlap": True}, "the profile of vllm 0.29.0 knows no two-batch overlap"),
        ({"all_to_all": "deepep"}, "sends tokens to experts by: none"),
    ):
        with pytest.raises(InputError, match=said):
            chosen_engine(EngineChoice(**keys), gpus)  # type: ignore[arg-type]


# --- two-batch overlap


def test_halves_hold_half_of_the_tokens_and_pairs() -> None:
    """One prompt is cut, several are dealt out, and sequences are."""
    for count, tokens, cached in ((1, 1000, 300), (1.5, 800, 0), (2, 700, 50), (7, 90, 0)):
        load = replace(prompts(tokens, count), cached_tokens=np.asarray(float(cached)))
        half = load.half
        assert float(half.tokens) == pytest.approx(float(load.tokens) / 2)
        attended, whole = (
            float(each.prompts * (pairs(each.prompt_tokens, each.cached_tokens)
                                  - each.prompt_tokens / 2))
            for each in (half, load)
        )  # fmt: skip
        assert attended == pytest.approx(whole / 2)
    assert float(decode_load(9, 100).half.sequences) == 4.5


@given(times=st.tuples(*[st.floats(0, 10)] * 4), fixed=st.floats(0, 1), layers=st.integers(1, 6))
def test_the_closed_form_is_the_schedule(
    times: tuple[float, float, float, float], fixed: float, layers: int
) -> None:
    """Ops in their order on two streams, each after what it waits for, end when S11 says."""
    attention, dispatch, experts, combine = times
    terms = [
        Term(name, "", np.asarray(layers * (seconds + own)), launch_s=layers * own)
        for name, seconds, own in (
            ("attention", attention, 0.0),
            ("experts up", experts, 0.0),
            ("expert dispatch", dispatch, fixed),
            ("expert combine", combine, fixed),
        )
    ]
    found = overlapped(terms, layers=layers, expert_layers=layers, on_sms=True)
    total = sum(float(term.seconds) for term in found)
    assert total == pytest.approx(
        scheduled(attention + fixed, dispatch, experts + fixed, combine, layers), abs=1e-9
    )
    for term, hidden in zip(found[2:], (dispatch, combine), strict=True):
        assert -1e-9 <= float(term.hidden_s) <= 2 * layers * hidden + 1e-9


def scheduled(a: float, d: float, e: float, c: float, layers: int) -> float:
    """Run a, d, e, c of two halves through layers: a, e on one stream, d, c on the other."""
    done = [0.0, 0.0]  # of each half
    free = {"compute": 0.0, "network": 0.0}
    for _ in range(layers):
        for stream, seconds in (("compute", a), ("network", d), ("compute", e), ("network", c)):
            for half in (0, 1):
                end = max(done[half], free[stream]) + seconds
                done[half] = free[stream] = end
    return max(done)


LOADS = st.one_of(
    st.builds(decode_load, st.integers(32, 1024).map(float), st.floats(1, 20_000)),
    st.builds(prompts, st.integers(512, 8192).map(float), st.integers(1, 6)),
)


@settings(max_examples=40, deadline=None)
@given(load=LOADS, ranks=st.sampled_from([8, 16, 32]))
def test_a_split_step_is_between_its_bounds(load: StepLoad, ranks: int) -> None:
    """At least all compute and at least all communication; at most both halves one by one."""
    slicing, here = Slicing(dp=ranks, ep=ranks), machine(overlap=True)
    terms = step_terms(here, load, slicing=slicing)
    total = float(step_s(here, load, slicing=slicing))
    sent = {"expert dispatch", "expert combine"}
    compute = sum(float(each.seconds) for each in terms if each.name not in sent)
    sending = sum(float(each.seconds + each.hidden_s) for each in terms if each.name in sent)
    assert max(compute, sending) <= total <= compute + sending + 1e-12
    assert sum(float(each.hidden_s) for each in terms) == pytest.approx(compute + sending - total)
    assert all(float(each.hidden_s) >= -1e-12 for each in terms)


def test_below_the_threshold_nothing_changes() -> None:
    """31 sequences, or 511 tokens of prompts, are one batch; 32 and 512 are two halves."""
    for load in (decode_load(31, 1000), prompts(511, 1)):
        assert step_terms(machine(overlap=True), load, slicing=WIDE) == step_terms(
            machine(), load, slicing=WIDE
        )
    for load in (decode_load(32, 1000), prompts(512, 1)):
        whole, split = both(load, WIDE)
        assert whole != split


def test_steps_of_an_array_are_split_one_by_one() -> None:
    """An array of loads has the seconds of each load by itself, on both sides of the thresholds."""
    loads = [
        decode_load(8, 900), decode_load(200, 900), prompts(100, 1), prompts(3000, 2),
        replace(prompts(600, 1), sequences=np.asarray(40.0), context_tokens=np.asarray(900.0)),
    ]  # fmt: skip
    together = StepLoad(
        **{
            name: np.array([float(getattr(each, name)) for each in loads])
            for name in (
                "prompts", "prompt_tokens", "cached_tokens", "sequences", "context_tokens",
            )
        }
    )  # fmt: skip
    here = machine(overlap=True)
    found = step_s(here, together, slicing=WIDE)
    assert found.tolist() == pytest.approx([float(step_s(here, x, slicing=WIDE)) for x in loads])


def test_tables_of_plans_keep_the_step_at_the_threshold() -> None:
    """31 sequences, or 511 prompt tokens, are read as one batch, 32 and 512 as two halves."""
    here = machine(overlap=True)
    lengths = {"contexts": (1000.0, 1500.0), "prompt_tokens": 1000.0}
    table = step_table(here, WIDE, most=(4000, 200), batches=1, **lengths)
    for batch in (31, 32):
        read, whole = table.step_s(0, 0, batch, batch * 1000), decode_load(batch, 1000)
        assert read == pytest.approx(float(step_s(here, whole, slicing=WIDE)), rel=1e-5)
    for tokens in (511, 512):
        read = table.step_s(tokens, tokens * (tokens + 1) / 2, 0, 0)
        whole = prompts(tokens, 1)
        assert read == pytest.approx(float(step_s(here, whole, slicing=WIDE)), rel=1e-4)


def test_small_batches_lose_and_large_ones_gain() -> None:
    """Each half reads the weights and launches kernels of its own, which few do not repay."""
    gains = [np.divide(*both(decode_load(b, 2000), WIDE)) for b in (32, 64, 128, 256, 512)]
    assert gains[0] < 1 < gains[-1]
    assert gains == sorted(gains)


def test_normal_kernels_take_sms_from_compute() -> None:
    """20 of 132: prompts compute as on 112 SMs; in decode all of them compute."""
    whole, split = (
        {term.name: term for term in step_terms(machine(overlap=each), load, slicing=WIDE)}
        for load in (prompts(8192, 2),)
        for each in (False, True)
    )
    before, beside = (float(each["attention prefill"].compute_s) for each in (whole, split))
    assert beside / before == pytest.approx(132 / 112, rel=0.02)
    decode = decode_load(256, 2000)
    half = {term.name: term for term in step_terms(machine(), decode.half, slicing=WIDE)}
    split = {term.name: term for term in step_terms(machine(overlap=True), decode, slicing=WIDE)}
    assert float(split["o"].seconds) == pytest.approx(2 * float(half["o"].seconds))


def test_what_a_step_does_once_is_not_doubled() -> None:
    """Output projection and the engine's work on a step see the whole batch."""
    load = decode_load(256, 2000)
    whole, split = (
        {term.name: term for term in step_terms(machine(overlap=each), load, slicing=WIDE)}
        for each in (False, True)
    )
    for name in ("lm_head", "engine per step", "engine per sequence"):
        assert float(split[name].seconds) == float(whole[name].seconds)


# --- published


def test_prompts_gain_what_sglang_published() -> None:
    """27 to 35 % more tokens/s on 32 H100 with 8,192 tokens a GPU, and the rate with 16,384."""
    known = PUBLISHED["overlap"]
    slicing = Slicing(dp=known["prompt_ranks"], ep=known["prompt_ranks"])
    whole, split = both(prompts(known["prompt_tokens"], 2), slicing, "sglang")
    low, high = known["prompt_gains"]
    assert low - 0.03 < whole / split - 1 < high + 0.03
    _, split = both(prompts(known["prompt_tokens"], 4), slicing, "sglang")
    per_s = 8 * 4 * known["prompt_tokens"] / split
    assert per_s == pytest.approx(known["node_tokens_per_s"], rel=0.10)


def test_decode_gains_are_those_of_sglang_but_for_large_batches() -> None:
    """
    On 72 H100 a loss with 32 sequences, none or a gain between 64 and 128.

    Missed: with 256 sequences the gain is 41 % where 25.5 % was published, the step 11 % too fast.
    """
    known = PUBLISHED["overlap"]
    slicing = Slicing(dp=known["decode_ranks"], ep=known["decode_ranks"])
    gains, per_s = {}, {}
    for batch in (32, 64, 128, 256):
        load = decode_load(float(batch), known["context_tokens"])
        whole, split = both(load, slicing, "sglang")
        gains[batch], per_s[batch] = whole / split - 1, 8 * batch / split
    published = {int(batch): gain for batch, gain in known["decode_gains"].items()}
    assert gains[32] == pytest.approx(published[32], abs=0.05)
    assert gains[64] < 0 < gains[128]
    assert published[256] < gains[256] < published[256] + 0.20
    assert per_s[256] == pytest.approx(known["decode_node_tokens_per_s"], rel=0.15)
