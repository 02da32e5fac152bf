"""
Our TTFT and TPOT beside those of `vllm bench serve`, AIPerf and the OpenAI client.

    python benchmarks/third_party.py                       # against the bundled server
    python benchmarks/third_party.py --host http://127.0.0.1:8000 --model demo \
        --tokenizer .minicluster/models/demo --vocab-size 4480 --rate 3

Each client loads the same endpoint in turn with constant gaps between requests, so that they all
make the same load; ours first and last in turn, `--rounds` times, for machines drift: all rounds
are compared together, and how far ours alone were apart is printed beside. Definitions are
aligned: TTFT from the send to the first chunk with content (ours from the scheduled arrival is
what the SLO is judged on, and longer by our own lag); TPOT (last - first chunk) / (tokens - 1).
An endpoint on simulated engines is compared like any other, in seconds of the clock. `--chat` asks
for chats in place of completions; answers of simulated engines are token ids in figures, which is
why AIPerf takes the server's count of tokens.
AIPerf is not part of our stack: `--aiperf PATH` says where its command is
(`pip install aiperf==0.13.0` into an environment of its own).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from loadtest.client.chat import learn_chat
from loadtest.client.endpoint import check_model
from loadtest.client.launch import launch_client
from loadtest.run.folder import prepare, read_run
from loadtest.run.run_config import RunLength, free_load, make_job
from loadtest.run.schedule import ArrivalShape
from loadtest.selftest.mock_server import MockConfig
from loadtest.selftest.selftest import mock_server
from minicluster.errors import Exit
from minicluster.specs.slo import SloSpec
from minicluster.specs.workload import Lengths, WorkloadSpec
from minicluster.workload.sources import RequestSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BENCH = Path(__file__).parent / "clients" / "vllm_bench_serve.py"
MAX_FRACTION, MAX_S = 0.05, 0.005
"""Our figures may differ from theirs by the larger of both."""
WARMUPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load that every client sends: the options of this command, and a folder for its files."""

    host: str
    model: str
    tokenizer: Path
    vocab_size: int
    rate: float
    input_tokens: int
    output_tokens: int
    requests: int
    chat: bool
    rounds: int
    aiperf: str
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of each request that one client had answered."""

    client: str
    ttft_s: Sequence[float]
    tpot_s: Sequence[float]

    def statistic(self, metric: str, name: str) -> float:
        """Return `mean`, `p50` or `p99` of `ttft` or `tpot`."""
        values = getattr(self, f"{metric}_s")
        return float(np.mean(values) if name == "mean" else np.percentile(values, int(name[1:])))


def pooled(rounds: Sequence[Measured]) -> Measured:
    """Put the rounds of one client together."""
    return Measured(
        client=rounds[0].client,
        ttft_s=np.concatenate([each.ttft_s for each in rounds]),
        tpot_s=np.concatenate([each.tpot_s for each in rounds]),
    )


def ours(load: Load) -> Measured:
    """Load the endpoint with our client; TTFT from the send, as the others have it."""
    workload = WorkloadSpec(
        requests_per_s=load.rate,
        input_tokens=Lengths.fixed(load.input_tokens),
        output_tokens=Lengths.fixed(load.output_tokens),
    )
    free = free_load(workload, SloSpec(), model=load.model, vocab_size=load.vocab_size)
    job = make_job(
        free,
        RunLength(num_requests=load.requests, warmup_s=WARMUPS / load.rate),
        host=load.host,
        shape=ArrivalShape(source=RequestSource(process="constant")),
    )
    if load.chat:
        job = replace(job, chat=learn_chat(load.host, load.model))
    folder = load.folder / "ours"
    prepare(folder, job, job.requests(), None)
    launch_client(folder, lambda _: None)
    answered = [s for s in read_run(folder).measured if s.ok]
    return Measured(
        client="loadtest",
        ttft_s=[s.ttft_send_s for s in answered],
        tpot_s=[s.tpot_s or 0.0 for s in answered],
    )


def vllm_bench(load: Load) -> Measured:
    """Run `vllm bench serve`; a gamma process without variation has constant gaps."""
    result = load.folder / "vllm.json"
    api = ("openai-chat", "/v1/chat/completions") if load.chat else ("openai", "/v1/completions")
    run(
        *(sys.executable, str(BENCH), "--backend", api[0], "--base-url", load.host),
        *("--endpoint", api[1], "--model", load.model),
        *("--tokenizer", str(load.tokenizer), "--dataset-name", "random", "--seed", "1"),
        *("--random-input-len", str(load.input_tokens)),
        *("--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(load.requests), "--num-warmups", str(WARMUPS)),
        *("--request-rate", str(load.rate), "--burstiness", "1e6"),
        *("--ignore-eos", "--temperature", "0", "--save-result", "--save-detailed"),
        *("--disable-tqdm", "--result-filename", str(result)),
    )
    seen = json.loads(result.read_text())
    tpot = [sum(gaps) / (load.output_tokens - 1) for gaps in seen["itls"]]
    return Measured(client="vllm bench", ttft_s=seen["ttfts"], tpot_s=tpot)


def aiperf(load: Load) -> Measured:
    """Run AIPerf at a constant rate; what it calls inter-token latency is our TPOT."""
    folder = load.folder / "aiperf"
    run(
        *(load.aiperf, "profile", "-m", load.model, "--tokenizer", str(load.tokenizer.resolve())),
        *("--url", load.host, "--endpoint-type", "chat" if load.chat else "completions"),
        "--streaming",
        *("--isl", str(load.input_tokens), "--osl", str(load.output_tokens)),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
        *("--request-rate", str(load.rate), "--arrival-pattern", "constant"),
        *("--request-count", str(load.requests), "--warmup-request-count", str(WARMUPS)),
        *("--random-seed", "1", "--use-server-token-count", "--no-server-metrics"),
        *("--no-gpu-telemetry", "--ui", "none", "--artifact-dir", str(folder)),
    )
    (path,) = folder.rglob("profile_export.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [r["metrics"] for r in lines if r["metadata"]["benchmark_phase"] == "profiling"]
    ttft, tpot = (
        [row[name]["value"] / 1e3 for row in rows]
        for name in ("time_to_first_token", "inter_token_latency")
    )
    return Measured(client="AIPerf", ttft_s=ttft, tpot_s=tpot)


def openai_client(load: Load) -> Measured:
    """Send the same with OpenAI's own Python client, from one event loop."""
    return asyncio.run(_openai_client(load))


async def _openai_client(load: Load) -> Measured:
    from openai import AsyncOpenAI  # noqa: PLC0415  (seconds to import)

    rng = np.random.default_rng(time.time_ns())
    async with AsyncOpenAI(base_url=f"{load.host}/v1", api_key="none") as client:

        async def send(due_s: float) -> tuple[float, float]:
            await asyncio.sleep(due_s - time.monotonic())
            prompt = rng.integers(3, load.vocab_size, load.input_tokens).tolist()
            sent_s, times, tokens = time.monotonic(), [], 0
            stream = await client.completions.create(
                model=load.model,
                prompt=prompt,
                max_tokens=load.output_tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                if chunk.choices:
                    times.append(time.monotonic())
                if chunk.usage:
                    tokens = chunk.usage.completion_tokens
            return times[0] - sent_s, (times[-1] - times[0]) / (tokens - 1)

        for _ in range(WARMUPS):
            await send(time.monotonic())
        start_s = time.monotonic() + 0.5
        seen = await asyncio.gather(*(send(start_s + k / load.rate) for k in range(load.requests)))
    ttft, tpot = zip(*seen, strict=True)
    return Measured(client="OpenAI client", ttft_s=ttft, tpot_s=tpot)


def run(*command: str) -> None:
    """Run another tool; its output matters only if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def tokenizer(folder: Path) -> Path:
    """Write a word-level tokenizer for endpoints that have none, such as the mock server."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415

    words = {f"w{k}": k for k in range(1000)} | {"<unk>": 1000}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = folder / "tokenizer"
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(said))
    return path


@contextlib.contextmanager
def endpoint(host: str | None, folder: Path) -> Iterator[str]:
    """Yield *host*, or a bundled server with a TTFT of 200 ms and 40 ms a token."""
    if host:
        yield host
        return
    with mock_server(MockConfig(ttft_s=0.2, itl_s=0.04), folder / "truth.jsonl") as address:
        yield address


def agree(mine: float, theirs: float) -> bool:
    """Tell whether two figures are the same within 5 % or 5 ms."""
    return abs(mine - theirs) <= max(MAX_S, MAX_FRACTION * theirs)


def compare(mine: Sequence[Measured], theirs: Sequence[Measured]) -> bool:
    """Print one client beside ours, all rounds; return whether means and medians agree."""
    same = True
    us, them = pooled(mine), pooled(theirs)
    for metric in ("ttft", "tpot"):
        for name in ("mean", "p50", "p99"):
            a, b = us.statistic(metric, name), them.statistic(metric, name)
            alone = [each.statistic(metric, name) for each in mine]
            judged = name != "p99"
            same &= agree(a, b) or not judged
            word = ("agrees" if agree(a, b) else "DIFFERS") if judged else ""
            print(
                f"  {metric.upper()} {name:5} loadtest {1e3 * a:8.2f} ms  {them.client} "
                f"{1e3 * b:8.2f} ms  {1e3 * (a - b):+7.2f} ms ({a / b - 1:+.1%}; ours apart "
                f"{1e3 * (max(alone) - min(alone)):.2f} ms)  {word}"
            )
    return same


def main() -> int:
    """Print all comparisons; return 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", help="endpoint; the bundled server")
    parser.add_argument("--model")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model's tokenizer")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--chat", action="store_true", help="chats, not completions")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--aiperf", default="aiperf", help="its command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="third-party-") as name:
        folder = Path(name)
        with endpoint(given.host, folder) as host:
            model, slowdown = check_model(host, given.model)
            if slowdown is not None:
                print(f"simulated engines, {slowdown:g} times slower: in seconds of the clock")
            words = given.tokenizer or tokenizer(folder)
            found = {"host": host, "model": model, "tokenizer": words, "folder": folder}
            return compare_all(Load(**vars(given) | found))


def compare_all(load: Load) -> int:
    """Run every client against *load*, ours anew beside each; 1 if one differs, 4 if one lacks."""
    print(
        f"{load.rounds} x {load.requests} requests, {load.rate:g}/s at constant gaps, "
        f"{load.input_tokens} tokens in, {load.output_tokens} out, {load.host}"
    )
    # The OpenAI client spends 120 us and more on each event and some 5 ms on each request; what
    # is asked of it is that it measures the same, not how much it bears.
    few = replace(load, rate=min(load.rate, 1.0), requests=min(load.requests, 30))
    others: list[tuple[Callable[[Load], Measured], Load]] = [(vllm_bench, load)]
    complete = shutil.which(load.aiperf) is not None
    if complete:
        others.append((aiperf, load))
    else:
        print(f"AIPerf is not compared: no {load.aiperf} here (pip install aiperf==0.13.0)")
    others.append((openai_client, few))
    same = True
    for client, wanted in others:
        mine, theirs = in_turn(client, wanted)
        answered = [len(each.ttft_s) for each in (*mine, *theirs)]
        print(
            f"{theirs[0].client}: {load.rounds} x {wanted.requests} at {wanted.rate:g}/s",
            flush=True,
        )
        same &= set(answered) == {wanted.requests} and compare(mine, theirs)
    if not same:
        print("some DIFFER by more than 5 % and 5 ms")
        return 1
    print(f"{'all' if complete else 'those compared'} agree within 5 % or 5 ms")
    return Exit.DONE if complete else Exit.INCONCLUSIVE


def in_turn(
    client: Callable[[Load], Measured], load: Load
) -> tuple[list[Measured], list[Measured]]:
    """Run ours and another, ours first and last in turn; each round in a folder of its own."""
    found: dict[bool, list[Measured]] = {True: [], False: []}
    for number in range(load.rounds):
        for is_ours in (True, False) if number % 2 == 0 else (False, True):
            folder = Path(tempfile.mkdtemp(dir=load.folder))
            found[is_ours].append((ours if is_ours else client)(replace(load, folder=folder)))
    return found[True], found[False]


if __name__ == "__main__":
    sys.exit(main())
