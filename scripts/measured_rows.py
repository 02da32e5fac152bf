"""Parts of docs/validation.md: errors on real engines, intervals, claims, columns of the CSV."""

from __future__ import annotations

from itertools import groupby

from sizing.evidence.evidence import read_evidence
from sizing.report.validation import figures

KNOWN_BEFORE = (
    "These errors are not those of unseen rows. Some rows were used as follows:",
    "",
    (
        "- Fitted on half of the configurations of dli-static: the constants of the engine profile"
        " trtllm 0.9.0 and `sustained_fraction` of H100 and H200. The forms of their equations"
        " were chosen after all of dli-static was seen."
    ),
    "- Fitted on all rows: the intervals. They were tested on configurations left out.",
    (
        "- Chosen from other sources, with the errors of inferencex and silicon-internal in view:"
        " 0 s per layer beyond the ops, 7 µs per exchange, 0.8 ms per layer with experts in steps"
        " with prompts, the token budget of recipes, which engines keep the KV cache in 8 bits,"
        " whose fp8 checkpoints are scaled in blocks, whose version a split deployment names, how"
        " popular experts are (a range of 12, fitted to op tables), norms of queries and keys, and"
        " the quantisation subtracted from the fp8 GEMM tables. The 0.8 ms are aiconfigurator's;"
        " its authors calibrated them on all of the silicon rows, which include inferencex and"
        " silicon-internal, so the value is not independent of them."
    ),
    (
        "- Not fitted on, but in view: blis, when four values were introduced: 0 s per layer,"
        " steps that are scheduled ahead, the 7 ms of the API server, and the repeated prompts."
        " Each has its own source: vLLM's engine core, a run of vLLM's API server, and the"
        " workload files of inference-sim with the code of inference-perf"
        " (`configs/validation/protocols.toml`)."
    ),
    (
        "- Not fitted on, but in view: the eight split rows of inferencex, when decode slots were"
        " introduced. The slots come from NVIDIA's srt-slurm recipes."
    ),
    (
        "- Not fitted on, but in view: the rows of inferencex whose recipes name a token budget or"
        " batch waiting prompts (`configs/validation/protocols.toml`)."
    ),
    "- Not fitted on and not in view: trtllm-docs.",
    "",
    (
        "Known errors that are not corrected: prompts of DeepSeek-V3 and GLM-5 on SGLang lack a"
        " constant 0.1 s, or a quarter of the time; the users of some rows of silicon-internal do"
        " not seem to start together, as the simulation assumes; some rows seem to be of several"
        " replicas (Llama-3.1-8B-FP8 on vLLM 0.12, gpt-oss on vLLM 0.11.2)."
    ),
)
"""Which rows were used to choose or fit the numbers behind the errors."""


COLUMNS = (
    "## Rows of your own",
    "",
    (
        "`sizing validate ROWS.csv` reads a CSV with these columns and one line per measurement."
        " The columns in bold are required. Times are in seconds. `-o` writes one line per row:"
        " `id, status, reason, ttft_s, tpot_s, ttft_p99_s` and the ends of the 80 % intervals."
        " `status` is `predicted`, `infeasible` or `unsupported`; the last two have a reason."
    ),
    "",
    "| column | meaning |",
    "|---|---|",
    "| **id**, source, licence | name of the row; where it was measured; its terms of use |",
    "| **model**, **gpu** | catalog name or Hugging Face id; catalog name |",
    "| **engine**, engine_version | vllm, sglang, trtllm; empty: unknown |",
    "| **weight_dtype**, kv_dtype | bf16, fp8, fp4, int4; empty: the engine's default |",
    "| **serving**, **gpus** | aggregated or disaggregated; number of GPUs of the deployment |",
    "| tp, pp, ep | of an aggregated deployment; GPUs beyond tp · pp are copies of attention |",
    (
        "| prefill_replicas, prefill_tp, prefill_pp, prefill_ep, decode_replicas, decode_tp,"
        " decode_pp, decode_ep | of a disaggregated deployment |"
    ),
    (
        "| **load**, batch_size, concurrency, requests_per_s | `static`: one batch; `closed`: users"
        " in a loop; `open`: Poisson arrivals; then the size of that load |"
    ),
    (
        "| **isl**, **osl**, length_jitter | input and output tokens; lengths are uniform in"
        " [(1 - jitter) nominal, nominal] |"
    ),
    "| prefix_tokens | input tokens that are in the prefix cache |",
    "| ttft_s, tpot_s, ttft_p99_s, statistic | measurements; mean or median of the first two |",
    "| max_num_batched_tokens | token budget of a step, where known |",
    "| requests, duration_s | of an open loop: how many, or for how long; else 1,500 requests |",
    "",
)


def real_engines() -> list[str]:
    """Errors on real engines by slice, and what the intervals cover."""
    evidence = read_evidence()
    lines = [
        "## Real engines",
        "",
        (
            f"`sizing validate` ran on {evidence.date}. Errors are relative to the measurement and"
            " given as mean absolute / median absolute / median signed error of the predicted"
            " rows. A row is answered if it is predicted, or if it is called infeasible and was"
            " measured above 10 s or 10 times the unloaded prefill. The sources are: inferencex"
            " and silicon-internal, measurements in aiconfigurator-core 0.12.0 (NVIDIA,"
            " Apache-2.0; the protocol of the second is undocumented); dli-static, a TensorRT-LLM"
            " 0.9 table of an NVIDIA course; blis, vLLM 0.15.1 runs of inference-sim; and"
            " trtllm-docs, the TensorRT-LLM 0.5 documentation."
        ),
        "",
        *KNOWN_BEFORE,
        "",
    ]
    for by, found in groupby(evidence.errors, key=lambda each: each.by):
        lines += [
            f"| {by} | rows | answered | infeasible | TTFT | TPOT | TTFT p99 |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {each.name} | {each.rows} | {each.answered / each.rows:.0%} |"
                f" {each.infeasible} | {figures(each.ttft)} | {figures(each.tpot)} |"
                f" {figures(each.ttft_p99)} |"
                for each in found
            ),
            "",
        ]
    return [*lines, *_coverage(), *_claims()]


def _coverage() -> list[str]:
    """Intervals tried on rows that they were not made from."""
    return [
        "### 80 % intervals",
        "",
        (
            "The intervals are quantiles of the residuals by engine, load and kind of model; each"
            " group is shrunk towards its larger parent group (docs/model.md, V5). They were"
            " tested on configurations left out, in ten folds, with everything refitted without"
            " them:"
        ),
        "",
        "| source | | rows | inside | median width |",
        "|---|---|---|---|---|",
        *(
            f"| {each.source} | {each.quantity.upper()} | {each.rows} |"
            f" {each.covered_fraction:.0%} | {each.median_width:.0%} |"
            for each in read_evidence().coverage
        ),
        "",
    ]


def _claims() -> list[str]:
    """Return how often a statement "below this limit, with this confidence" is right."""
    claims = read_evidence().claims
    levels = sorted({each.confidence for each in claims})
    shares: dict[tuple[str, str], list[str]] = {}
    rows: dict[tuple[str, str], int] = {}
    for each in claims:
        key = (each.source, each.quantity)
        rows[key] = each.rows
        cell = f"{each.bound_fraction:.0%} ({each.right_fraction:.0%})"
        shares.setdefault(key, []).append(cell)
    return [
        "### Claims",
        "",
        (
            "A claim says that a latency stays below a limit with some confidence; its bound is"
            " the quantile of that level (V5). The table counts correct claims on configurations"
            " left out: at the bound itself, the tightest limit that can be claimed, and in"
            " brackets at the lowest limit above it on a grid with 10 % steps. If all steps take"
            " longer by a factor, so do the latencies of a closed loop, so the bounds on both are"
            " the same."
        ),
        "",
        "| source | | rows |" + "".join(f" at {level:.0%} |" for level in levels),
        "|---|---|---|" + "---|" * len(levels),
        *(
            f"| {source} | {quantity.upper()} | {rows[source, quantity]} | "
            + " | ".join(found)
            + " |"
            for (source, quantity), found in shares.items()
        ),
        "",
    ]
