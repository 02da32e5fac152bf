"""Answers to the claims of seeds 000 and 001: two talks."""

from __future__ import annotations

from pathlib import Path

from seed_figures import (
    DAY,
    LONG,
    MONTH,
    RING,
    TRAIN,
    YEAR,
    Entry,
    bands,
    built,
    by_rule,
    llama2_hours,
    messages_shrink,
    peak,
    place,
    prefill,
    ranks,
    rate_is_linear,
    rule,
    scaled,
    topology,
)

from minicluster.specs.parameters import num_parameters
from minicluster.specs.topology import inventory_of
from sizing import catalog
from sizing.cli.studies import LENGTHS
from sizing.training.closed_forms import achieved_flops_per_s, training_s, weight_set_bytes
from sizing.training.flops import training_flops

TALKS: list[Entry] = [
    (
        "000",
        "Llama-2-70B training compute",
        rule("70e9", "2e12", 2000, "135.6e12"),
        lambda: float(training_flops(70e9, 2e12)),
    ),
    ("000", 'Llama-2-70B "1.7 billion', rule("70e9", "2e12", 2000, "135.6e12"), llama2_hours),
    (
        "000",
        'Llama 2 "70',
        "`sizing models`",
        lambda: num_parameters(catalog.find_model("llama-2-70b")),
    ),
    (
        "000",
        '"more than one month',
        rule("70e9", "2e12", 2000, "135.6e12"),
        lambda: llama2_hours() / 2000 / 24,
    ),
    (
        "000",
        '"about 42 000',
        topology("talk-32k"),
        lambda: catalog.find_network("talk-32k")[1].gpus,
    ),
    (
        "000",
        "currently about 2000",
        place("talk-32k", 8, 1, 256),
        lambda: len(ranks("talk-32k", 8, 1, 256).ranks),
    ),
    (
        "000",
        "30 EFLOP/s",
        rule("70e9", "2e12", 32_768, "915.5e12"),
        lambda: float(achieved_flops_per_s(3 * 30e18, 32_768, 1.0)) / 1e12,
    ),
    (
        "000",
        "33% MFU",
        rule("70e9", "2e12", 32_768, "329.8e12"),
        lambda: float(1 / training_s(1e18, 32_768, peak("h100") / 3)),
    ),
    (
        "000",
        "Llama training in less",
        rule("70e9", "2e12", 32_768, "915.5e12"),
        lambda: float(training_s(training_flops(70e9, 2e12), 1, 30e18)) / 3600,
    ),
    (
        "000",
        "about one petaflop",
        rule("70e9", "4096", 1, "1e15"),
        lambda: tuple(float(training_flops(70e9, s)) / 1e15 for s in (2048, 4096)),
    ),
    (
        "000",
        "train with hundreds",
        rule("70e9", "4096", 1, "1e15"),
        lambda: float(training_flops(70e9, 2e12) / training_flops(70e9, 4096)),
    ),
    ("000", "few petaflops", LONG, lambda: prefill(32_768) / 1e15),
    (
        "000",
        "prefill cannot",
        LONG,
        lambda: float(training_s(prefill(32_768), 8, peak("h100") / 2)),
    ),
    (
        "000",
        "TTFT target",
        LONG,
        lambda: catalog.read_scenario(Path("llama-2-70b-long")).slo.ttft_s,
    ),
    (
        "000",
        "TPOT target",
        LONG,
        lambda: 1e3 * catalog.read_scenario(Path("llama-2-70b-long")).slo.tpot_s,
    ),
    ("000", "sequence lengths", LONG, lambda: tuple(float(n) for n in LENGTHS.split(",")[:3])),
    ("000", "mini-cluster 16", LONG, lambda: by_rule(32_768)),
    ("000", "mini-cluster 32", LONG, lambda: by_rule(65_536)),
    ("000", "mini-cluster 64", LONG, lambda: by_rule(100_000)),
    ("000", "scale-out bandwidth", topology("talk-32k"), lambda: bands("talk-32k")[1]),
    ("000", "scale-up bandwidth", topology("talk-32k"), lambda: bands("talk-32k")[0]),
    (
        "000",
        "scale-up : scale-out",
        topology("talk-32k"),
        lambda: bands("talk-32k")[0] / bands("talk-32k")[1],
    ),
    (
        "000",
        "32K GPU fabric",
        topology("talk-32k"),
        lambda: catalog.find_network("talk-32k")[1].units(1),
    ),
    (
        "000",
        "18 cluster switches",
        "`sizing fabric bom --preset talk-32k`",
        lambda: built().details[1].switches_per_unit + built().details[1].spares_per_unit,
    ),
    (
        "000",
        "training set 16k",
        place("talk-32k", 8, 2, 1024),
        lambda: ranks("talk-32k", 8, 2, 1024).cuts[0].ring,
    ),
    (
        "000",
        "messages shrink",
        RING,
        messages_shrink,
    ),
    (
        "000",
        "host has 8",
        topology("talk-32k"),
        lambda: catalog.clusters()["talk-32k"].gpus_per_node,
    ),
    (
        "001",
        "GPT-3 on 8 V100",
        rule("175e9", "300e9", 8, "34.66e12"),
        lambda: float(achieved_flops_per_s(training_flops(175e9, 300e9), 8, 36 * YEAR)) / 1e12,
    ),
    (
        "001",
        "GPT-3 on 512",
        rule("175e9", "300e9", 512, "33.42e12"),
        lambda: float(achieved_flops_per_s(training_flops(175e9, 300e9), 512, 7 * MONTH)) / 1e12,
    ),
    (
        "001",
        "GPT-3 512xV100",
        rule("175e9", "300e9", 512, "34.66e12"),
        lambda: float(training_s(training_flops(175e9, 300e9), 512, 34.66e12)) / DAY,
    ),
    (
        "001",
        "175B parameters",
        rule("175e9", "300e9", 512, "34.66e12"),
        lambda: float(weight_set_bytes(175e9)) / 1e9,
    ),
    (
        "001",
        "training multiplies",
        rule("175e9", "300e9", 512, "34.66e12"),
        lambda: float(weight_set_bytes(175e9, multiple=8)) / 1e9,
    ),
    (
        "001",
        "E2ETT ~",
        rule("175e9", "300e9", 1024, "140e12", full=True),
        lambda: float(training_s(training_flops(175e9, 300e9, recompute=True), 1024, 140e12)) / DAY,
    ),
    (
        "001",
        "E2ETT 1T",
        rule("1.008e12", "450e9", 3072, "163e12", full=True),
        lambda: (
            float(training_s(training_flops(1.008e12, 450e9, recompute=True), 3072, 163e12)) / DAY
        ),
    ),
    (
        "001",
        "training time",
        rule("1e9", "2e9", 8, "1e14"),
        lambda: bool(
            training_s(training_flops(1e9, 2e9), 8, 1e14)
            == 2 * training_s(training_flops(1e9, 1e9), 8, 1e14)
        ),
    ),
    ("001", "rate =", rule("1e9", "2e9", 16, "1e14"), rate_is_linear),
    ("001", "Scale Factor", TRAIN, scaled),
    (
        "001",
        "140-node",
        topology("dgx-superpod-h100"),
        lambda: 8 * len(inventory_of(catalog.find_network("dgx-superpod-h100")[1], 140 * 8).nodes),
    ),
]
