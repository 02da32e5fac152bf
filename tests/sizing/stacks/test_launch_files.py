"""Launch files as people write them: what they start, or the name of what is not read."""

# ruff: noqa: E501  (a file and its answer in one line)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minicluster.errors import InputError
from sizing.stacks.read import ReadDeployment, read_deployed
from tests.sizing.stacks.test_read import SERVE

MODEL = "meta-llama/Llama-3.1-8B-Instruct"
NIXL = '{"kv_connector": "NixlConnector", "kv_role": "%s"}'
PRODUCER = f"--kv-transfer-config '{NIXL % 'kv_producer'}'"
CONSUMER = f"--kv-transfer-config '{NIXL % 'kv_consumer'}'"


def read(text: str, folder: Path) -> ReadDeployment:
    """Return what a file of this text says."""
    file = folder / "launch"
    file.write_text(text)
    return read_deployed(file)


def pod(kind: str, container: dict[str, Any], **spec: object) -> str:
    """Return a manifest of Kubernetes with one container."""
    inner = {"spec": {"containers": [container]}}
    of = inner["spec"] if kind == "Pod" else {"template": inner}
    return json.dumps({"apiVersion": "apps/v1", "kind": kind, "spec": {**of, **spec}})


def graph(version: str = "v1alpha1", **workers: dict[str, Any]) -> str:
    """Return a DynamoGraphDeployment."""
    head = {"apiVersion": f"nvidia.com/{version}", "kind": "DynamoGraphDeployment"}
    return json.dumps({**head, "spec": {"services": workers}})


def worker(*args: str, command: tuple[str, ...] = (), **keys: object) -> dict[str, Any]:
    """Return a worker of Dynamo that runs a command with arguments."""
    main = {"command": [*(command or ("python3", "-m", "dynamo.vllm"))], "args": [*args]}
    return {"componentType": "worker", "extraPodSpec": {"mainContainer": main}, **keys}


GPUS = {"resources": {"limits": {"nvidia.com/gpu": "4"}}}

STARTED: dict[str, tuple[str, dict[str, str]]] = {
    # a shell's variables, loops and words around the engine
    "variables": (f'TP=2; export M={MODEL}\nvllm serve "$M" -tp $TP --port $PORT', {"mixed": "1xTP2"}),
    "a default": (f"{SERVE} --tensor-parallel-size ${{TP:-4}}", {"mixed": "1xTP4"}),
    "a range": (
        f"for i in {{0..3}}; do\n  CUDA_VISIBLE_DEVICES=$i {SERVE} --port $((8000 + i)) &\ndone",
        {"mixed": "4xTP1"},
    ),
    "loops in a loop": (f"for a in x y; do for b in 1 2 3; do {SERVE} & done; done", {"mixed": "6xTP1"}),
    "two kinds in a loop": (
        f"for r in 1 2; do\n{SERVE} -tp 2 {PRODUCER} &\n{SERVE} -tp 4 {CONSUMER} &\ndone",
        {"prefill": "2xTP2", "decode": "2xTP4"},
    ),
    "words before": (f"nohup env A=b CUDA_VISIBLE_DEVICES=0 {SERVE} -tp 2 > log 2>&1 &", {"mixed": "1xTP2"}),
    "a pipe": (f"set -e\n{SERVE} -tp=8 2>&1 | tee log", {"mixed": "1xTP8"}),
    "a shell's text": (f'bash -lc "cd /x && {SERVE} -tp 2"', {"mixed": "1xTP2"}),
    "a command in a variable": (f"CMD='{SERVE} -tp 2'\n$CMD", {"mixed": "1xTP2"}),
    "an array": (f'A=(-tp 2)\nA+=(--max-num-seqs 8)\n{SERVE} "${{A[@]}}"', {"mixed": "1xTP2"}),
    "a module": (
        f"python3 -u -m vllm.entrypoints.openai.api_server --model {MODEL} --tensor_parallel_size=4",
        {"mixed": "1xTP4"},
    ),
    "a container": (
        f"docker run --gpus all -p 80:8000 vllm/vllm-openai:v0.11.0 \\\n  --model {MODEL} -tp 2",
        {"mixed": "1xTP2"},
    ),
    "a container's shell": (
        f'docker run --entrypoint bash -v vllm:/x my/vllm:1 -c "{SERVE} -tp 2"',
        {"mixed": "1xTP2"},
    ),
    "an engine after a test of the port": (
        f"wait_for() {{ until curl localhost:$1; do sleep 1; done; }}\n{SERVE} &\nwait_for 8000",
        {"mixed": "1xTP1"},
    ),
    "exported variables in a shell": (f"export TP=2\nX=y bash -c '{SERVE} -tp $TP'", {"mixed": "1xTP2"}),
    "a container's variables": (
        f"TP=4; docker pull vllm/vllm-openai\ndocker run -v /vllm-openai:/x -e TP=2 --entrypoint=bash vllm/vllm-openai -c '{SERVE} -tp $TP'",
        {"mixed": "1xTP2"},
    ),
    "a container as root": (f"sudo docker run -d vllm/vllm-openai {MODEL} -tp 2", {"mixed": "1xTP2"}),
    "containers in a loop": (
        f"for i in 1 2; do docker run -d --rm vllm/vllm-openai --model {MODEL}; done", {"mixed": "2xTP1"},
    ),
    "subshells in a loop": (f"for i in 1 2; do (cd /$i && exec {SERVE}) & done; wait", {"mixed": "2xTP1"}),
    "an activated environment": (f"TP=2\nsource x/bin/activate\n{SERVE} -tp $TP", {"mixed": "1xTP2"}),
    # flags as vLLM's parser takes them
    "short flags": (f"{SERVE} -tp 2 -pp 2 -asc 4 -O2", {"mixed": "1xTP2xPP2"}),
    "experts": (f"{SERVE} -dp 4 -ep", {"mixed": "1xTP1xDP4xEP4"}),
    "a beginning of a flag": (f"{SERVE} --tensor 2 --no-enable-expert", {"mixed": "1xTP2"}),
    "dotted roles": (
        f"{SERVE} --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role=kv_producer &\n{SERVE} {CONSUMER}",
        {"prefill": "1xTP1", "decode": "1xTP1"},
    ),
    "nodes": (
        f"{SERVE} -tp 16 --nnodes 2 --node-rank 0\n{SERVE} -tp 16 --nnodes 2 --node-rank 1 --headless",
        {"mixed": "1xTP16"},
    ),
    # manifests
    "a deployment": (
        pod("Deployment", {"image": "vllm/vllm-openai:v1", "args": [MODEL, "-tp", "4"], **GPUS}, replicas=3),
        {"mixed": "3xTP4"},
    ),
    "a pod's shell": (
        pod("Pod", {
            "command": ["/bin/sh", "-c"], "args": ['exec vllm serve $M -tp "$(TP)"'],
            "env": [{"name": "M", "value": MODEL}, {"name": "TP", "value": "2"}],
        }),
        {"mixed": "1xTP2"},
    ),
    "a list": (
        f'kind: List\nitems:\n- {pod("StatefulSet", {"command": SERVE.split(), "args": ["-tp", 2]})}',
        {"mixed": "1xTP2"},
    ),
    "Ray's split pools": (
        """applications:
- import_path: ray.serve.llm:build_pd_openai_app
  args:
    prefill_config: {model_loading_config: {model_id: m}, deployment_config: {num_replicas: 2}}
    decode_config:
      model_loading_config: {model_id: m}
      engine_kwargs: {tensor_parallel_size: 2, enable_lora: false, seed: null}
""",
        {"prefill": "2xTP1", "decode": "1xTP2"},
    ),
    "dynamo's modes": (
        graph(
            P=worker("--model", MODEL, "--disaggregation-mode", "prefill", replicas=2),
            D=worker("--model", MODEL, "--disaggregation-mode=decode", subComponentType="decode",
                     resources={"limits": {"gpu": 4}}, multinode={"nodeCount": 2},
                     envs=[{"name": "X", "value": "y"}]),
        ).replace(f'"{MODEL}", "--disaggregation-mode=decode"',
                  f'"{MODEL}", "-tp", "8", "--disaggregation-mode=decode"'),
        {"prefill": "2xTP1", "decode": "1xTP8"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STARTED)
def test_what_a_file_starts(tmp_path: Path, name: str) -> None:
    """Pools of the engines that bash, Kubernetes and vLLM would make of it."""
    text, pools = STARTED[name]
    assert read(text, tmp_path).pools == pools


SAID: list[tuple[str, dict[str, object]]] = [
    ("--max-model-len 8K --max-num-batched-tokens 2k",
     {"model.max_context_tokens": 8192, "engine.max_num_batched_tokens": 2000}),
    ("--long-prefill-token-threshold 512 --block-size 32 --no-enable-prefix-caching",
     {"engine.chunked_prefill_tokens": 512, "engine.block_size": 32, "workload.prefix_tokens": 0}),
    ("-tp 2 --kv-offloading-size 64", {"engine.kv_offload_host_bytes": 2.0**35}),
    ("-sc.method eagle3 -sc.num_speculative_tokens 3", {"engine.speculative_tokens": 3}),
    ("--spec-method mtp --spec-tokens 2", {"engine.speculative_tokens": 2}),
    ("--enable-lora --max-loras 2 --lora-modules a=/x b=/y",
     {"engine.max_loras": 2, "workload.lora_adapters": 2}),
    ("--max-loras 2", {}),
    ("--dtype float32 --kv-cache-dtype bfloat16", {"model.weight_dtype": "fp32", "model.kv_dtype": "bf16"}),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "keys"), SAID)
def test_what_flags_say(tmp_path: Path, flags: str, keys: dict[str, object]) -> None:
    """Keys of a scenario, and no others."""
    found = dict(read(f"{SERVE} {flags}", tmp_path).keys)
    assert (found.pop("model.id"), found.pop("engine.name")) == (MODEL, "vllm")
    assert found == keys


REFUSED: list[tuple[str, str]] = [
    (f"{SERVE} {PRODUCER.replace('producer', 'both')}\npython3 proxy.py", "kv_role is 'kv_both'; it has to be"),
    (f"{SERVE} {PRODUCER.replace('Nixl', 'P2pNccl')}", "is 'P2pNcclConnector'; it has to be NixlConnector"),
    (f"{SERVE} -tp $(nvidia-smi -L | wc -l)", "$(nvidia-smi -L | wc -l)` becomes is not known"),
    # what bash makes of it is not what it seems
    (f"TP=4\nbash -c '{SERVE} -tp $TP'", "what `$TP` becomes is not known"),
    (f"TP=2\nsource env.sh\n{SERVE} -tp $TP", "$TP after `source` in line 2"),
    (f"TP=2\nread TP\n{SERVE} -tp $TP", "$TP after `read` in line 2"),
    (f"TP=2; ((TP *= 2)); {SERVE} -tp $TP", "$TP after `((…))` in line 1"),
    (f"TP=2; unset TP; {SERVE} -tp $TP", "$TP after `unset` in line 1"),
    (f"A=(-tp 2); A[1]=4\n{SERVE} ${{A[@]}}", "what `$A` becomes is not known"),
    (f"A=()\n{SERVE} -tp $A", "--tensor-parallel-size/-tp is missing"),
    (f"{SERVE} -tp {{2,4}}", "what `{2,4}` becomes is not known"),
    (f"for i in {{a,b}}; do {SERVE} & done", "a `for` over what the file does not say"),
    (f"for i in {{0..6..2}}; do {SERVE} & done", "a `for` over what the file does not say"),
    ("vllm serve /models/* -tp 2", "what `/models/*` becomes is not known"),
    (f"{SERVE} \\ \n  -tp 4", "launch:2 is '-tp'; it has to be a command: the line above it has to end in"),
    (f"{SERVE} \\\n  # two\n  -tp 4", "launch:3 is '-tp'; it has to be a command"),
    (f"for i in 0 1; do {SERVE}; done", "a loop that waits for it"),
    (f"for i in 0 1; do {SERVE} & break; done", "a `for` with `break`"),
    (f"for i in 0 1; do [ $i = 1 ] && continue; {SERVE} & done", "a `for` with `continue`"),
    (f"{SERVE} &\nkill $!\n{SERVE} &", "launch:3 starts an engine after `kill`; it has to be a file of engines that run at"),
    (f"for i in 0 1; do {SERVE} & wait; done", "starts an engine after `wait`"),
    (f"grep -q H100 gpus && {SERVE}", "what is left of `&&`"),
    (f"bash <<< '{SERVE}'", "starts bash with an engine in its arguments or its text"),
    (f"CMD='{SERVE}' ./start.sh", "starts start.sh with an engine in its arguments or its text"),
    (f"{SERVE} &\ndocker run --gpus all rocm/vllm --model {MODEL}", "has to be an image whose command is known"),
    # roles that stand elsewhere
    (f"LMCACHE_NIXL_ROLE=sender {SERVE} &\nLMCACHE_NIXL_ROLE=receiver {SERVE} &", "LMCACHE_NIXL_ROLE is 'sender in"),
    (f"VLLM_DP_RANK=0 {SERVE} &\nVLLM_DP_RANK=1 {SERVE} &", "VLLM_DP_RANK is '0 in"),
    (f"{SERVE} --port 1 &\n{SERVE} --port 2 &\npython3 proxy.py --prefiller-ports 1 --decoder-ports 2", "has to be a file that says the role of each"),
    ("\n---\n".join(
        f"kind: Deployment\nmetadata: {{name: x-{role}}}\nspec: {{template: {{spec: {{containers: [{{image: vllm/vllm-openai, args: [m]}}]}}}}}}"
        for role in ("prefill", "decode")
    ), "has to be a file that says the role of each"),
    # roles that differ where a scenario has one value
    (f"{SERVE} --max-model-len 8192 {PRODUCER}\n{SERVE} {CONSUMER}", "model.max_context_tokens is '8192 in prefill and the default in decode'"),
    (f"{SERVE} {PRODUCER}\n{SERVE} --spec-method mtp --spec-tokens 2 {CONSUMER}", "engine.speculative_tokens is 'the default in prefill and 2 in"),
    (f"{SERVE} --kv-cache-memory-bytes 1G\n{SERVE}", "--kv-cache-memory-bytes is '1073741824 in"),
    (SERVE + """ --kv-transfer-config '{"kv_connector": "MultiConnector"}'""", 'has to be a list of "connectors"'),
    (f"""{SERVE} {PRODUCER.replace('}', ', "kv_connector_extra_config": {"a": 1}}')}""", "is 'a'; it has to be at most the keys"),
    (f"{SERVE} $ARGS", "what `$ARGS` becomes is not known"),
    (f"{SERVE} --served-model-name a $MORE", "what `$MORE` becomes is not known"),
    (f"if x; then TP=2; fi\n{SERVE} -tp $TP", "$TP after an `if` in line 1"),
    (f"if x; then {SERVE}; fi", "launch:1 has an engine in an `if`"),
    (f"for i in $(seq 4); do\n{SERVE} &\ndone", "launch:2 has an engine in a `for` over what the file"),
    (f"for ((i = 0; i < 4; i++)); do {SERVE} & done", "a counting `for ((…))`"),
    (f"while true; do {SERVE}; done", "a `while` or `until`"),
    (f"start() {{ {SERVE}; }}\nstart; start", "has an engine in a function"),
    (f"test -e x || {SERVE}", "what is left of `||`"),
    (f"# 2 replicas\nfor i in 0 1; do {SERVE} & done", "'2 replicas', but there can be no comment"),
    (f"exit 0\n{SERVE}", "has an engine in an `exit` above"),
    (f"#SBATCH --array=0-3\n{SERVE}", "has an engine in an array of jobs"),
    (f"srun -N 4 {SERVE}", "has srun -N 4 before an engine"),
    (f"mpirun -np 2 bash -c '{SERVE}'", "has mpirun -np 2 before an engine"),
    (f"ssh host '{SERVE}'", "starts ssh with an engine in its arguments or its text"),
    (f"cat > x.sh <<EOF\n{SERVE}\nEOF\nbash x.sh", "starts cat with an engine in its arguments or its text"),
    (f"{SERVE} --tensor-paralel-size 2", "such as --tensor-parallel-size"),
    (f"{SERVE} --max-num-s 2", "--max-num-s could match --max-num-scheduled-tokens"),
    (f"{SERVE} -dcp 2", "--decode-context-parallel-size is not modelled"),
    (f"{SERVE} --attention-backend X --cpu-offload-gb 4", "--attention-backend, --cpu-offload-gb are not"),
    (f"{SERVE} --port", "--port is missing; it has to be one argument"),
    (f"{SERVE} --max-num-seqs 1\n{SERVE}", "is '1 in"),
    (f"{SERVE} --headless", "is a further node; it has to be beside the first node of its replica"),
    (f"{SERVE} {CONSUMER.replace('NixlConnector', 'OffloadingConnector')}", '"cpu_bytes_to_use"'),
    (f"""{SERVE} --speculative-config '{{"method": [1]}}'""", '"method" mtp or eagle3'),
    (f"{SERVE} --kv-transfer-config.kv_connector '[1]'", "is '[1]'; it has to be NixlConnector"),
    (f"true &&\n# then\n{SERVE} -tp x", "--tensor-parallel-size is 'x'"),
    (f"{SERVE} --speculative-config 3", "--speculative-config is '3'; it has to be a JSON object"),
    (f"{SERVE} -sc.a 3 -sc.a.b 4", "is '4', but there can be no table in the value of a"),
    (f"{SERVE} --kv-transfer-config x", "is 'x'; it has to be a JSON object"),
    (f"{SERVE} --config /etc/hosts", "--config is '/etc/hosts', but there can be no file of flags"),
    (f"{SERVE} --enable-eplb --eplb-config.num_redundant_experts x", '"num_redundant_experts" of 0'),
    ("kind: A\nkind: B\n", "launch:2 is no YAML: kind a second time; it has to be YAML with each key once"),
    ("kind: [\n", "it has to be YAML"),
    ("kind: RayService\nspec: {}\n", "launch:1: kind is 'RayService'; it has to be a DynamoGraphDeployment"),
    ("kind: LLMInferenceService\n", "kind is 'LLMInferenceService'"),
    ("modelArtifacts: {uri: hf://m}\n", "kind is 'values of a chart of llm-d'"),
    (f"services:\n  a:\n    command: {SERVE}\n", "kind is 'a file of docker-compose'"),
    ("applications: []\n", "kind is 'a Serve config of Ray'"),
    (f"# a recipe\n---\nmodel: x\nguide: |\n  {SERVE}\n", "launch:3: kind is missing; it has to be"),
    ("kind: Service\n", "starts no engine of vLLM; it has to be a command"),
    ("applications:\n- import_path: ray.serve.llm:build_openai_app\n  args: {llm_configs: [{lora_config: {}}]}\n", "is 'lora_config'; it has to be at most"),
    ("applications: [{import_path: serving.replicas.app:from_plan}]\n", "of `serving manifest` the plan says"),
    (f"{SERVE} &\npython3 -m sglang.launch_server --model-path x", "starts another engine, sglang.launch_server"),
    ("python3 -m sglang.launch_server --model-path x", "starts another engine, sglang.launch_server; it has to be a command"),
    (graph(W=worker("--model", MODEL, autoscaling={"enabled": True})), "spec.services.W is 'autoscaling'; it has to be at most"),
    (pod("Pod", {"image": "rocm/vllm", "args": ["--model", MODEL]}), "has to be an image whose command is known"),
    (pod("Deployment", {"image": "vllm/vllm-openai", "args": [MODEL], "resources": {"limits": {"nvidia.com/mig-1g.10gb": 1}}}), "is 'nvidia.com/mig-1g.10gb'; it has to be GPUs"),
    (graph(W=worker("--model", MODEL), V={"replicas": 4, "extraPodSpec": {"mainContainer": {"args": ["dynamo.vllm"]}}}), "in containers beside those that are read"),
    (f"kind: Pod\nspec: {{initContainers: [{{command: [vllm, serve, x]}}], containers: [{{image: vllm/vllm-openai, args: [{MODEL}]}}]}}", "in containers beside those"),
    ("kind: LeaderWorkerSet\nspec: {leaderWorkerTemplate: {size: 2}}", "kind is 'LeaderWorkerSet'; it has to be a DynamoGraphDeployment, or one of Deployment"),
    ("kind: Deployment\nspec:\n  replicas: {{ .Values.n }}\n", "it has to be YAML with each key once"),
    (pod("Pod", {"command": SERVE.split(), "env": ["x"]}), "env is a list of other things; it has to be a list of tables"),
    (graph("v2", W=worker()), "apiVersion is 'nvidia.com/v2'"),
    (graph(W=worker("--model", MODEL, command=("python3", "-m", "dynamo.sglang"))), "a worker of dynamo.vllm"),
    (graph(W=worker("--model", MODEL, "--connector", "kvbm")), "--connector is 'kvbm'"),
    (graph(W=worker("--model", MODEL, resources={"limits": {"gpu": "2"}})), "GPUs of a replica is 2; it has to be"),
    (graph(W=worker("--model", MODEL, "--is-prefill-worker", subComponentType="decode")), "decode, prefill"),
    (graph(W=worker("--model", "$(M)", "-tp", "2")), "what `$(M)` becomes is not known"),
    (pod("Pod", {"command": SERVE.split(), "resources": {"limits": {"google.com/tpu": 4}}}), "is 'google.com/tpu'; it has to be GPUs"),
    (pod("Deployment", {"command": SERVE.split()}, replicas="$N"), "replicas is '$N'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_not_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    """The refusal has the place, what stands there and what was expected; no traces of Python."""
    with pytest.raises(InputError) as refused:
        read(text, tmp_path)
    said = str(refused.value)
    assert message in said
    assert not any(each in said for each in ("Error(", "object at", "{'", "['", "None"))


NOTED: list[tuple[str, str]] = [
    (
        f"TP=${{TP:-4}}\n{SERVE} -tp $TP",
        "$TP is taken as 4, the default: the environment may say otherwise",
    ),
    (f"{SERVE} -tp ${{TP-4}} --port ${{P:=1}}", "$TP is taken as 4, $P is taken as 1, the default"),
    (f"VLLM_X=1 VLLM_PORT=2 {SERVE}", "not read, and not in the prediction: VLLM_X"),
    (
        f"{SERVE} --kv-cache-memory-bytes 1G",
        "--kv-cache-memory-bytes 1073741824 decides the KV cache",
    ),
    (f"sleep 1; {SERVE}", "commands that start no engine of vLLM are not read: sleep"),
]


@pytest.mark.parametrize(("text", "note"), NOTED)
def test_what_is_assumed_is_said(tmp_path: Path, text: str, note: str) -> None:
    """Defaults of variables, and what is left out, are named."""
    assert any(note in each for each in read(text, tmp_path).notes)


BY_ROLE: list[tuple[str, str, dict[str, object], str]] = [
    ("--max-num-seqs 8", "--max-num-seqs 99", {"engine.max_num_seqs": 99}, "8 in prefill and 99 in decode"),
    ("--max-num-seqs 256", "--max-num-seqs 64", {"engine.max_num_seqs": 64}, "that of decode, which alone"),
    ("--max-num-seqs 8", "", {}, "8 in prefill and the default in decode"),
    ("--max-num-batched-tokens 8192", "--max-num-batched-tokens 512", {"engine.max_num_batched_tokens": 8192}, "that of prefill"),
    ("", "--no-enable-prefix-caching", {}, "the default in prefill and 0 in decode"),
    ("--gpu-memory-utilization 0.95", "--gpu-memory-utilization 0.9", {"engine.gpu_memory_utilization": 0.9}, "the smaller is taken"),
    ("--gpu-memory-utilization 0.95", "", {"engine.gpu_memory_utilization": 0.92}, "0.95 in prefill and 0.92 in decode"),
]  # fmt: skip


@pytest.mark.parametrize(("prefill", "decode", "keys", "note"), BY_ROLE)
def test_pools_that_differ_are_named(
    tmp_path: Path, prefill: str, decode: str, keys: dict[str, object], note: str
) -> None:
    """Of two limits that of the pool that depends on it is taken, with a word."""
    found = read(f"{SERVE} {prefill} {PRODUCER}\n{SERVE} {decode} {CONSUMER}", tmp_path)
    assert {k: v for k, v in found.keys.items() if k not in {"model.id", "engine.name"}} == keys
    assert any(note in each for each in found.notes)
