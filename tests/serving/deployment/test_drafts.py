"""Speculative decoding deployed: vLLM's arguments, facts, refusals, admission, simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from minicluster.engine_model.limits import EngineLimits
from minicluster.engine_model.step_seconds import PlannedStep
from minicluster.errors import InputError
from minicluster.plan import Deployment, Plan, plan_from, to_json
from minicluster.specs.engine import EngineOptions
from minicluster.specs.model import DraftSpec
from serving.deployment.compile import compile_app
from serving.deployment.engine_args import DeployTarget, engine_kwargs, planned_facts
from serving.deployment.feasibility import findings
from serving.deployment.target import Target
from serving.request.cost import InflightLoad, PoolInFlight, RequestCost, forecast
from serving.simulated.engine import EngineClock, SimulatedEngine
from tests.plans import STEP
from tests.serving.forks import Forks
from tests.serving.virtual_time import run

GPU = DeployTarget(kind="gpu")
SIMULATED = DeployTarget(kind="simulated")
EAGLE = DraftSpec(
    method="eagle3", source="a-hub/a-head", num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=64,
    vocab_size=100,
)  # fmt: skip


def drafting(deployment: Deployment, draft: DraftSpec, drafts: int = 2) -> Deployment:
    engine = replace(deployment.engine, speculative_tokens=drafts, mean_accepted_tokens=drafts / 2)
    return replace(deployment, engine=engine, model=replace(deployment.model, draft=draft))


def planned(plan: Plan) -> Plan:
    """Return a plan with one draft a step, all accepted."""
    model = replace(plan.model, draft=DraftSpec(method="mtp"))
    engine = replace(plan.engine, speculative_tokens=1, mean_accepted_tokens=1.0)
    return replace(plan, inputs=replace(plan.inputs, model=model), engine=engine)


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (DraftSpec(method="mtp"), {"method": "mtp", "num_speculative_tokens": 2}),
        (EAGLE, {"method": "eagle3", "num_speculative_tokens": 2, "model": "a-hub/a-head"}),
    ],
)
def test_both_pools_draft_alike(
    deployment: Deployment, draft: DraftSpec, said: dict[str, object]
) -> None:
    """The draft head's KV cache is transferred as well; without drafts nothing is said of them."""
    for pool in deployment.pools:
        assert "speculative_config" not in engine_kwargs(deployment, pool, GPU)
        given = engine_kwargs(drafting(deployment, draft), pool, GPU)
        assert given["speculative_config"] == said
        facts = planned_facts(drafting(deployment, draft), pool)
        assert facts["speculative_tokens"] == 2


def test_a_model_on_disk_without_such_layers_is_a_finding(
    deployment: Deployment, target: Target
) -> None:
    """Before anything starts; with the layers there is no finding of them."""
    asked = drafting(deployment, DraftSpec(method="mtp"))
    [said] = [each for each in findings(asked, target) if "speculative_tokens" in each]
    assert "has no multi-token-prediction layers" in said
    config = Path(deployment.model.source) / "config.json"
    text = config.read_text()
    config.write_text(json.dumps(json.loads(text) | {"num_nextn_predict_layers": 1}))
    try:
        assert not [each for each in findings(asked, target) if "speculative" in each]
    finally:
        config.write_text(text)


def test_a_deployment_without_a_head_is_refused(deployment: Deployment) -> None:
    """An edited file: the key, its value and what is expected."""
    engine = replace(deployment.engine, speculative_tokens=2)
    with pytest.raises(
        InputError, match=r"engine.speculative_tokens is 2; it has to be 0: the model"
    ):
        replace(deployment, engine=engine)
    with pytest.raises(
        InputError, match=r"engine.mean_accepted_tokens is 3.0; it has to be at most"
    ):
        replace(deployment.engine, speculative_tokens=2, mean_accepted_tokens=3.0)


def test_a_plan_with_drafts_is_compiled_as_it_was_read(plan: Plan) -> None:
    """The file keeps them; the endpoint and the simulated engines get them."""
    given = planned(plan)
    again = plan_from(json.loads(to_json(given)), place="plan.json")
    assert again == given
    app = compile_app(again.deployment, SIMULATED, plan=again)
    assert app.endpoint.tokens_per_step == 2.0
    for pool in app.pools:
        assert pool.simulated is not None
        assert pool.simulated.limits.options.speculative_tokens == 1
        assert pool.simulated.limits.options.mean_accepted_tokens == 1.0
        assert pool.llm_config["engine_kwargs"]["speculative_config"]["method"] == "mtp"


def test_admission_forecasts_the_time_per_token(plan: Plan) -> None:
    """Two tokens a step halve it; the time to the first token stays."""
    cost = RequestCost(prompt_tokens=50.0, output_tokens=20.0)
    pools = (PoolInFlight(1), PoolInFlight(1, sequences=3, context_tokens=300.0))
    one = InflightLoad(
        prefill=pools[0],
        decode=pools[1],
        max_batch_size=8,
        max_step_tokens=512,
        prefill_busy_fraction=1.0,
        tokens_per_step=1.0,
    )
    plain, drafted = (
        forecast(plan.step_model, cost, replace(one, tokens_per_step=each)) for each in (1.0, 2.0)
    )
    assert drafted.tpot_s == pytest.approx(plain.tpot_s / 2)
    assert drafted.ttft_s == plain.ttft_s


def test_a_simulated_engine_gives_several_tokens_of_a_step_at_once() -> None:
    """Chunks of one or two tokens, three in two steps on average, up to the last one asked for."""
    limits = EngineLimits(
        max_num_seqs=4, max_num_batched_tokens=512, kv_blocks=100, block_size=16,
        options=EngineOptions(speculative_tokens=2, mean_accepted_tokens=0.5),
    )  # fmt: skip

    async def answered() -> list[int]:
        engine = SimulatedEngine(limits, PlannedStep(STEP), EngineClock(1.0))
        sequence, seen = engine.add(30, (), 40), [0]
        while not sequence.done:
            seen.append(await sequence.more_than(seen[-1]))
        return seen

    seen = run(answered())
    assert seen[:2] == [0, 1]
    assert {after - before for before, after in pairwise(seen)} == {1, 2}
    assert seen[-1] == 40
    assert len(seen) == 2 + 39 // 1.5


VLLM = """
import json, sys
from vllm.config import ParallelConfig
from vllm.engine.arg_utils import EngineArgs
given = EngineArgs(
    model=sys.argv[1], skip_tokenizer_init=True, speculative_config=json.loads(sys.argv[2])
)
config = given.create_speculative_config(given.create_model_config(), ParallelConfig())
print(config.method, config.num_speculative_tokens, config.draft_model_config.hf_config.model_type)
"""
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 128,
    "num_hidden_layers": 4, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 2048,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16, "moe_intermediate_size": 64, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def test_vllm_takes_the_arguments(deployment: Deployment, forks: Forks, tmp_path: Path) -> None:
    """Its own parser finds the draft layers of the model by what we pass."""
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    asked = drafting(deployment, DraftSpec(method="mtp"))
    given = engine_kwargs(asked, asked.pools[0], GPU)["speculative_config"]
    said = forks.run(VLLM, str(tmp_path), json.dumps(given))
    assert said[-1] == "mtp 2 deepseek_mtp"
