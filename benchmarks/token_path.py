"""
What a streamed token costs on its way: processor time of each process, by its role.

    python benchmarks/token_path.py                        # 48 and 200 streams, about 3 minutes
    python benchmarks/token_path.py --streams 48 --repeat 5 --json
    python benchmarks/token_path.py --plan out/demo/plan.json --engine vllm --streams 16
    python benchmarks/token_path.py --plan out/demo/plan.json --server vllm --streams 16
    python benchmarks/token_path.py --plan out/demo/plan.json --server ray-llm --streams 16

Deploys a plan (of an 8B model on simulated engines, unless one is given) on loopback, sends so many
streams at once, and reads the kernel's clocks of all processes of the deployment before and after.
Processor time barely depends on what else runs; gaps and times to first token do, so nothing else
should run. `--server` measures, with the same load, vLLM's own API server or Ray Serve LLM's own
application, on one engine with the plan's model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from minicluster.command import terminable
from serving.cluster.ports import free_ports
from serving.cluster.processes import cluster_processes

if TYPE_CHECKING:
    from collections.abc import Iterator

BIN = Path(sys.executable).parent
HOST = "127.0.0.1"
OUT = Path("out/token_path")
STATE = Path(".minicluster/serving/state.json")
MARK = "MINICLUSTER_BENCHMARK"
"""Environment variable that identifies the processes of this benchmark."""

ROLES = {
    "endpoint": re.compile(r"ray::ServeReplica.*Ingress|openai.api_server"),
    "proxy": re.compile(r"ray::ProxyActor"),
    "gate": re.compile(r"ray::ServeReplica.*Gate"),
    "decode": re.compile(r"ray::ServeReplica.*(Decode|Mixed|LLMServer)"),
    "engine": re.compile(r"VLLM::"),
    "prefill": re.compile(r"ray::ServeReplica.*Prefill"),
    "controller": re.compile(r"ray::ServeController"),
    "ray": re.compile(r"raylet|gcs_server|dashboard|agent"),
}
"""Titles of processes by role; the first that fits counts."""

TOKEN = b'"text":'
"""Text that occurs once in the event of each token."""

FAILED = (b"HTTP/1.1 4", b"HTTP/1.1 5")

APART_S = 0.05
"""Time between the starts of two streams: prefill takes its time, and is not what is measured."""

LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """
    One load: what it cost, and how it went.

    Attributes:
        tokens: that arrived at the clients.
        cpu_us: processor time per token by role, microseconds.
        core_fraction: of one core, of the endpoint.
        ttft_s, gap_s: medians and 99th percentiles.
    """

    streams: int
    tokens: int
    seconds: float
    cpu_us: dict[str, float]
    core_fraction: float
    ttft_s: tuple[float, float]
    gap_s: tuple[float, float]


def main() -> None:
    """Deploy, load, print, take down."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[1])
    parser.add_argument("--plan", type=Path, help="default: llama-3.1-8b-h100")
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--server", choices=("serving", *SERVERS), default="serving")
    parser.add_argument("--slowdown", type=float, default=4.0, help="of simulated engines")
    parser.add_argument("--endpoints", type=int, default=1, help="endpoint processes")
    parser.add_argument("--streams", type=int, nargs="+", default=[48, 200])
    parser.add_argument("--tokens", type=int, default=300, help="of each answer")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of each prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ[MARK] = mark = secrets.token_hex(8)
    os.environ["MINICLUSTER_ADMISSION"] = "off"
    if STATE.exists():
        raise SystemExit("something is deployed from this directory; stop it: serving down")
    plan = given.plan or planned()
    [port] = free_ports(1)
    with terminable(), deployed(given, plan, port, mark):
        model = json.loads(plan.read_text(encoding="utf-8"))["model"]["id"]
        asyncio.run(measured(port, model, 8, given, mark))  # connections are made, code is warm
        costs = [
            asyncio.run(measured(port, model, streams, given, mark))
            for _ in range(given.repeat)
            for streams in given.streams
        ]
    print(json.dumps([asdict(cost) for cost in costs]) if given.json else table(costs))


@contextmanager
def deployed(given: argparse.Namespace, plan: Path, port: int, mark: str) -> Iterator[None]:
    """Have the server that is measured."""
    if given.server != "serving":
        with other_server(given.server, plan, port, mark):
            yield
        return
    engine = ("--engine", "simulated", "--slowdown", given.slowdown)
    engines = engine if given.engine == "simulated" else ()
    try:
        run("serving", "up", plan, "--port", port, *engines, "--endpoints", given.endpoints)
        yield
    finally:
        run("serving", "down")


VLLM = """
import os, sys
source, model, port = sys.argv[1:]
os.execv(sys.executable, [
    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", source,
    "--served-model-name", model, "--host", "127.0.0.1", "--port", port,
    "--max-model-len", "2048", "--max-num-seqs", "16", "--enforce-eager",
])
"""

RAY_LLM = """
import sys, time
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
source, model, port = sys.argv[1:]
config = LLMConfig(
    model_loading_config={"model_id": model, "model_source": source},
    engine_kwargs={"max_model_len": 2048, "max_num_seqs": 16, "enforce_eager": True},
    placement_group_config={"bundle_per_worker": {"CPU": 1}},
    accelerator_config={"kind": "cpu"},
    deployment_config={"num_replicas": 1},
    log_engine_metrics=False,
)
ray.init(num_cpus=8, include_dashboard=False)  # it waits for a CPU of each actor
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(build_openai_app({"llm_configs": [config]}))
time.sleep(3600)
"""

SERVERS = {"vllm": VLLM, "ray-llm": RAY_LLM}
"""Programs that start other servers, of the folder of a model, its name and a port."""


@contextmanager
def other_server(server: str, plan: Path, port: int, mark: str) -> Iterator[None]:
    """Have a server that is not ours."""
    model = json.loads(plan.read_text(encoding="utf-8"))["model"]
    source = str(Path(model["source"]).resolve())
    line = [sys.executable, "-c", SERVERS[server], source, model["id"], str(port)]
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / f"{server}.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(line, stdout=log, stderr=log)  # noqa: S603  (ours)
        try:
            deadline = time.monotonic() + LIMIT_S
            while not answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{server} did not start: see {log.name}")
                time.sleep(1.0)
            yield
        finally:
            for pid in cluster_processes(mark, MARK):
                with suppress(psutil.Error):
                    psutil.Process(pid).kill()
            process.wait()


def answers(port: int) -> bool:
    """Return whether a server has a model."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/v1/models", timeout=5) as answer:
            return b'"id"' in answer.read()
    except OSError:
        return False


def planned() -> Path:
    """Plan for an 8B model; return the plan's file."""
    OUT.mkdir(parents=True, exist_ok=True)
    run("sizing", "plan", "llama-3.1-8b-h100", "-o", OUT / "plan.json")
    return OUT / "plan.json"


def run(*parts: object) -> None:
    """Run one of our commands, which must end well."""
    line = [str(BIN / str(parts[0])), *map(str, parts[1:])]
    subprocess.run(line, check=True, stdout=subprocess.DEVNULL)  # noqa: S603  (ours)


async def measured(
    port: int, model: str, streams: int, given: argparse.Namespace, mark: str
) -> Cost:
    """Send the streams at once; return what they cost."""
    pids = roles(mark)
    before, begun_s = cpu_s(pids), time.perf_counter()
    async with asyncio.timeout(LIMIT_S):
        arrivals = await asyncio.gather(
            *(stream(port, model, given.prompt, given.tokens, seed) for seed in range(streams))
        )
    seconds, after = time.perf_counter() - begun_s, cpu_s(pids)
    tokens = sum(len(times) - 1 for times in arrivals)
    spent = {role: after[role] - before[role] for role in after}
    return Cost(
        streams=streams,
        tokens=tokens,
        seconds=seconds,
        cpu_us={role: 1e6 * value / tokens for role, value in spent.items()},
        core_fraction=spent["endpoint"] / seconds,
        ttft_s=middle_and_tail([times[1] - times[0] for times in arrivals]),
        gap_s=middle_and_tail(
            [late - early for times in arrivals for early, late in pairwise(times[1:])]
        ),
    )


async def stream(port: int, model: str, prompt: int, tokens: int, seed: int) -> list[float]:
    """Send one request; return when it was sent, and when each token arrived."""
    await asyncio.sleep(seed * APART_S)
    receiving, sending = await asyncio.open_connection(HOST, port)
    ids = [1000 + (seed * 7919 + number * 31) % 900 for number in range(prompt)]
    body = {"model": model, "prompt": ids, "max_tokens": tokens, "stream": True}
    raw = json.dumps(body | {"ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    sending.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
    times, tail = [time.perf_counter()], b""
    while not tail.endswith(b"0\r\n\r\n"):
        received = await receiving.read(65536)
        if not received or received.startswith(FAILED):
            raise RuntimeError(f"a stream failed: {(received or tail)[-300:]!r}")
        data = tail + received
        times += [time.perf_counter()] * data.count(TOKEN)
        tail = data[1 - len(TOKEN) :]
    sending.close()
    return times


def roles(mark: str) -> dict[int, str]:
    """Return the role of each process of the deployment."""
    found = {}
    for pid in cluster_processes(mark, MARK):
        try:
            title = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        found[pid] = next((role for role, name in ROLES.items() if name.search(title)), "other")
    return found


def cpu_s(pids: dict[int, str]) -> dict[str, float]:
    """Return the processor seconds of the processes so far, by role."""
    spent: dict[str, float] = {}
    for pid, role in pids.items():
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        spent[role] = spent.get(role, 0.0) + times.user + times.system
    return spent


def middle_and_tail(values: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]


def table(costs: list[Cost]) -> str:
    """Return the costs as text, a row for each load."""
    names = [role for role in (*ROLES, "other") if any(role in cost.cpu_us for cost in costs)]
    heads = f"{'streams':>8}{'tokens/s':>10}" + "".join(f"{role:>12}" for role in names)
    lines = ["processor time per token, µs", f"{heads}{'TTFT p50':>10}{'gap p99':>9}"]
    for cost in costs:
        parts = "".join(f"{cost.cpu_us.get(role, 0.0):12.1f}" for role in names)
        rate = cost.tokens / cost.seconds
        times = f"{1e3 * cost.ttft_s[0]:7.0f} ms{1e3 * cost.gap_s[1]:6.0f} ms"
        lines.append(f"{cost.streams:8}{rate:10.0f}{parts}{times}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
