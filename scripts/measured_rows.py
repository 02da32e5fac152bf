"""Parts of docs/validation.md: errors on real engines, intervals, claims, columns of the CSV."""

from __future__ import annotations

from itertools import groupby

from sizing.evidence.evidence import read_evidence
from sizing.report.validation import figures

KNOWN_BEFORE = (
    "These errors are not those of rows that nobody had seen. What was done with them:",
    "",
    (
        "- fitted on half of the configurations of dli-static: the constants of the engine"
        " profile trtllm 0.9.0 and `sustained_fraction` of H100 and H200; the forms of their"
        " equations were chosen after all of dli-static was seen"
    ),
    "- fitted on all rows: the intervals, tried on configurations left out",
    (
        "- chosen, from another source each, with the errors of inferencex and silicon-internal"
        " in view: 0 per layer (beyond what ops take), 7 µs per exchange, 0.8 ms per layer with"
        " experts of steps with prompts, the token budget of recipes, which engines keep the KV"
        " cache in 8 bits, whose fp8 checkpoints are scaled in blocks, whose version a split"
        " deployment names, how popular experts are (a range of 12, fitted to op tables), norms of"
        " queries and keys, the quantisation taken off"
        " the fp8 GEMM tables"
    ),
    (
        "- the 0.8 ms are aiconfigurator's, whose authors calibrated them on all of the silicon"
        " rows that inferencex and silicon-internal are a part of: not independent of them"
    ),
    (
        "- not fitted on, but in view: blis, when 0 per layer, the step put together ahead, the"
        " 7 ms of the API server and the repeated prompts were introduced; each has its own source:"
        " vLLM's engine core, a run of vLLM's API server, and the workload files of inference-sim"
        " with the code of inference-perf (`configs/validation/protocols.toml`)"
    ),
    (
        "- not fitted on, but in view: the eight split rows of inferencex, when decode slots were"
        " introduced; slots come from NVIDIA's srt-slurm recipes"
    ),
    (
        "- not fitted on, but in view: the rows of inferencex whose recipes name a token budget or"
        " let prompts wait for company (`configs/validation/protocols.toml`)"
    ),
    "- not fitted on: trtllm-docs",
    "",
    (
        "Known and not mended: prompts of DeepSeek-V3 and GLM-5 on SGLang (a constant 0.1 s, or a"
        " quarter of the time, is missing); users of silicon-internal seem not to start together in"
        " some rows, as is assumed; rows that seem to be of several replicas"
        " (Llama-3.1-8B-FP8 on vLLM 0.12, gpt-oss on vLLM 0.11.2)."
    ),
)
"""Note on the errors: which constants were chosen with knowledge of these rows."""


COLUMNS = (
    "## Rows of your own",
    "",
    (
        "`sizing validate ROWS.csv` reads a CSV with these columns, a line a measurement; those in"
        " bold have to be there. Times are in seconds. `-o` writes `id, status, reason, ttft_s,"
        " tpot_s, ttft_p99_s` and the ends of the 80 % intervals, a line for each of yours;"
        " `status` is `predicted`, `infeasible` or `unsupported`, the latter two with a reason."
    ),
    "",
    "| column | meaning |",
    "|---|---|",
    "| **id**, source, licence | of the row; where it was measured; what one may do with it |",
    "| **model**, **gpu** | catalog name or hub id; catalog name |",
    "| **engine**, engine_version | vllm, sglang, trtllm; empty: unknown |",
    "| **weight_dtype**, kv_dtype | bf16, fp8, fp4, int4; empty: the engine's default |",
    "| **serving**, **gpus** | aggregated or disaggregated; all GPUs of the deployment |",
    "| tp, pp, ep | aggregated; GPUs beyond tp pp are copies of attention |",
    (
        "| prefill_replicas, prefill_tp, prefill_pp, prefill_ep, decode_replicas, decode_tp,"
        " decode_pp, decode_ep | disaggregated |"
    ),
    (
        "| **load**, batch_size, concurrency, requests_per_s | static: one batch; closed: users who"
        " send again when answered; open: Poisson arrivals; and the amount of it |"
    ),
    (
        "| **isl**, **osl**, length_jitter | tokens in and out; lengths uniform in"
        " [(1 - jitter) nominal, nominal] |"
    ),
    "| prefix_tokens | of isl, in the prefix cache |",
    "| ttft_s, tpot_s, ttft_p99_s, statistic | measured; what the first two are: mean, median |",
    "| max_num_batched_tokens | tokens of a step, where known |",
    "",
)


def real_engines() -> list[str]:
    """Errors on real engines by slice, and what the intervals cover."""
    evidence = read_evidence()
    lines = [
        "## Real engines",
        "",
        (
            f"`sizing validate` on {evidence.date}. Errors are relative to the measurement: mean /"
            " median / bias, of rows that are predicted. Answered: predicted, or called infeasible"
            " and measured above 10 s or 10 times the unloaded prefill. Sources: inferencex and"
            " silicon-internal, the measurements in aiconfigurator-core 0.12.0 (NVIDIA,"
            " Apache-2.0; the protocol of the latter is undocumented); dli-static, a"
            " TensorRT-LLM 0.9 table of an NVIDIA course; blis, vLLM 0.15.1 runs of inference-sim;"
            " trtllm-docs, TensorRT-LLM 0.5 documentation."
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
            "Quantiles of the residuals by engine, load and kind of model, each group shrunk to"
            " what more rows say (docs/model.md, V5). Tried on configurations that were left out,"
            " ten folds, everything made anew without them:"
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
            "A claim says that a latency stays below a limit with some confidence: its bound is"
            " the quantile of that level (V5). Counted on configurations left out: claims right"
            " at the bound itself, the tightest limit that can be claimed, and in brackets at the"
            " lowest limit above it of a grid 10 % apart. Steps that are all longer by a factor"
            " make the latencies of a closed loop longer by it: bounds on both are the same."
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
