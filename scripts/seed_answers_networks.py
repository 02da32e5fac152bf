"""Answers to the claims of seeds 002 to 004: a paper and two articles on networks."""

from __future__ import annotations

from seed_figures import (
    BUILT,
    CROSS_RAIL,
    DAY,
    MODELS,
    PAPER,
    STUDY,
    Entry,
    bands,
    bom,
    built,
    domains_serve,
    forwarded,
    gain,
    latency_rises,
    place,
    ranks,
    relative,
    rule,
    shares,
    tier,
    tiers_in_order,
    topology,
    tree,
)

from sizing import catalog
from sizing.network.rail_only import optimal_model_parallel
from sizing.network.rail_only_study import savings_range, study
from sizing.training.closed_forms import training_s

NETWORKS: list[Entry] = [
    (
        "002",
        "GPT-3 355",
        rule("175e9", "300e9", 1, "28e12"),
        lambda: float(training_s(3.14e23, 1, 28e12)) / (365 * DAY),
    ),
    (
        "002",
        "NVLink4",
        "`sizing gpus`",
        lambda: catalog.find_gpu("h100").require("scale_up_bytes_per_s") * 2 * 8 / 1e12,
    ),
    ("002", "GH200 256-GPU", STUDY, lambda: 256 * PAPER.scale_up_bytes_per_s * 8 / 1e15),
    (
        "002",
        "ideal network 19.2x",
        STUDY,
        lambda: PAPER.scale_up_bytes_per_s / PAPER.scale_out_bytes_per_s,
    ),
    (
        "002",
        "PaLM-540B",
        rule("547e9", "780e9", 256, "989.5e12"),
        lambda: float(training_s(2.56e24, 256, 989.5e12)) / DAY,
    ),
    (
        "002",
        "cluster of 128",
        STUDY,
        lambda: catalog.find_network("gh200-256")[1].gpus,
    ),
    ("002", "more than 99%", STUDY, lambda: 100 * shares("gpt-3", 8).silent_pairs_fraction),
    ("002", "<0.25%", STUDY, lambda: 100 * shares("gpt-3", 8).hb_pairs_fraction),
    (
        "002",
        "intra-HB",
        STUDY,
        lambda: tuple(
            100 * shares(n).hb_bytes_fraction for n in ("gpt-3", "opt-175b", "palm-540b")
        ),
    ),
    (
        "002",
        "33% of any",
        bom(64),
        lambda: 100 * (1 - tree("rail-only").links / tree("clos").links),
    ),
    ("002", "ideal NVSwitch network gain 1.06x", STUDY, lambda: 1 / relative("gpt-3")),
    ("002", "ideal NVSwitch network gain 1.88x", STUDY, lambda: 1 / relative("palm-540b")),
    (
        "002",
        "N_M* independent",
        STUDY,
        lambda: tuple(optimal_model_parallel(MODELS[n], 16_384) for n in ("gpt-3", "opt-175b")),
    ),
    ("002", "HB 32->64 cuts GPT3", STUDY, lambda: gain("gpt-3", 32)),
    ("002", "HB 512->1024 cuts GPT3", STUDY, lambda: gain("gpt-3", 512)),
    ("002", "HB 32->64 cuts OPT", STUDY, lambda: gain("opt-175b", 32)),
    ("002", "HB 512->1024 cuts OPT", STUDY, lambda: gain("opt-175b", 512)),
    (
        "002",
        "GPT3 batch",
        STUDY,
        lambda: tuple(round(MODELS[n].tokens_per_batch, -5) for n in ("gpt-3", "opt-175b")),
    ),
    (
        "002",
        "PaLM batch",
        STUDY,
        lambda: tuple(t * MODELS["palm-540b"].tokens_per_batch for t in (1, 4)),
    ),
    (
        "002",
        "PaLM relative",
        STUDY,
        lambda: (100 * relative("palm-540b"), 100 * relative("palm-540b", 4)),
    ),
    ("002", "rail-only saves 37%", bom(64), lambda: 100 * savings_range(study(PAPER).savings)[0]),
    ("002", "rail-only saves 75%", bom(128), lambda: 100 * savings_range(study(PAPER).savings)[1]),
    (
        "002",
        "worst saving",
        STUDY,
        lambda: (
            min(study(PAPER).savings, key=lambda s: (round(s.saving_fraction, 6), s.radix)).radix
        ),
    ),
    (
        "002",
        '"only three quarters',
        bom(64),
        lambda: tree("rail-only").switches / tree("clos").switches,
    ),
    ("002", "3-tier Clos", bom(64), lambda: (tree("clos").tiers, tree("rail-only").tiers)),
    (
        "002",
        "rail switch failure",
        bom(64),
        lambda: tree("clos").switches_per_tier[0] == tree("rail-only").switches_per_tier[0],
    ),
    ("002", "each HB domain", place("dgx-h100", 8, 1, 4), domains_serve),
    (
        "002",
        "cross-rail",
        CROSS_RAIL,
        forwarded,
    ),
    (
        "002",
        "no Clos at",
        bom(64, 64, 8),
        lambda: max(tree(k, 64, 64, 8).switches for k in ("clos", "rail-only")),
    ),
    ("003", "rack 16", topology("roce-24k"), lambda: tier("roce-24k", "rack").gpus),
    ("003", "pod = 192", topology("roce-24k"), lambda: tier("roce-24k", "pod").gpus),
    ("003", "8 pods", topology("roce-24k"), lambda: catalog.find_network("roce-24k")[1].gpus),
    (
        "003",
        "405B run",
        place("roce-24k", 8, 16, 128),
        lambda: ranks("roce-24k", 8, 16, 128).cuts[-1].units,
    ),
    ("003", "Minipack2", BUILT, lambda: catalog.switches()["minipack2"].ports),
    (
        "003",
        "ToR uses",
        BUILT,
        lambda: 100 * built().details[0].ports_used / catalog.switches()["minipack2"].ports,
    ),
    ("003", '"7804', BUILT, lambda: catalog.switches()["arista-7804r3"].ports),
    ("003", "16 cluster switches", BUILT, lambda: built().details[1].switches_per_unit),
    ("003", "line card", BUILT, lambda: 32 * (tier("roce-24k", "zone").oversubscription + 1)),
    (
        "003",
        "oversubscription 1:7",
        BUILT,
        lambda: (
            tier("roce-24k", "zone").oversubscription,
            float(built().details[1].oversubscription or 0),
        ),
    ),
    ("003", "aggregation needs", BUILT, lambda: built().links_per_tier[-1]),
    ("003", "16 aggregation", BUILT, lambda: built().details[2].switches_per_unit),
    ("003", "fabric totals", BUILT, lambda: built().switches),
    (
        "003",
        "16 flows",
        "`sizing fabric ecmp`",
        lambda: 0 if (f := catalog.clusters()["roce-24k"].fabric) is None else f.flows,
    ),
    (
        "003",
        "Jericho2",
        BUILT,
        lambda: tuple(
            round(catalog.switches()[n].buffer_bytes / 1e9, 2)
            for n in ("arista-7804r3", "minipack2")
        ),
    ),
    ("003", "400 Gb/s", topology("roce-24k"), lambda: bands("roce-24k")[1]),
    (
        "003",
        "cross-pod",
        topology("roce-24k"),
        lambda: (
            tier("roce-24k", "zone").bytes_per_s / tier("roce-24k", "zone").oversubscription / 1e9
        ),
    ),
    ("004", "24,000", topology("roce-24k"), lambda: catalog.find_network("roce-24k")[1].gpus),
    ("004", "TP inside", place("roce-24k", 8, 16, 128), tiers_in_order),
    ("004", "adjacent", place("roce-24k", 8, 16, 128), tiers_in_order),
    ("004", "network hops", topology("roce-24k"), latency_rises),
]
