"""The commands of `sizing`, by what they are for, in the order of the help."""

from __future__ import annotations

from minicluster.lazy_commands import lazy_app

COMMANDS = {
    "Plan": {
        "init": ("catalog:init", "Write a commented scenario to start from."),
        "plan": (
            "plan:plan",
            "Find the fewest GPUs and their layout that hold the SLO, or say why there are none.",
        ),
        "explain": (
            "plan:explain",
            "Show every term of the prediction: equation, seconds, share, source; and the limits.",
        ),
        "predict": (
            "plan:predict",
            "Predict TTFT, TPOT, utilisation and capacity of pools that you name.",
        ),
        "simulate": (
            "simulate:simulate",
            "Simulate a plan: percentiles with intervals, queues and caches over time.",
        ),
        "losses": (
            "simulate:losses",
            "Simulate the plan whole, and with one replica less in each pool (N+1).",
        ),
        "ui": ("ui:ui", "Serve a page on which scenarios are planned and compared, until Ctrl-C."),
    },
    "Ask": {
        "fit": (
            "fit:fit",
            (
                "Tell whether a model fits so many GPUs, memory by memory; without one, which"
                " models do."
            ),
        ),
        "capacity": (
            "questions:capacity",
            "Find the highest rate, and the users, that so many GPUs carry within the SLO.",
        ),
        "day": (
            "questions:day",
            (
                "Compare static pools with autoscaling over a day: GPU-hours, attainment, static"
                " share."
            ),
        ),
        "decisions": (
            "questions:decisions",
            "Plan anew with one decision or forecast changed at a time: what each costs in GPUs.",
        ),
        "split-map": (
            "questions:split_map",
            "Map where split pools need less than aggregated ones, and how sure that is.",
        ),
        "compare": (
            "studies:compare",
            "Compare plans of scenarios, GPUs or engines: GPUs, power, cost, latency, headroom.",
        ),
        "sweep": (
            "studies:sweep",
            "Plan every combination of values of some scenario keys; infeasible ones say why.",
        ),
        "pareto": (
            "studies:pareto",
            (
                "Show the Pareto fronts: cost against TTFT and TPOT, tokens/s per GPU against per"
                " user."
            ),
        ),
        "long-context": (
            "studies:long_context",
            (
                "Count the GPUs that hold the TTFT of one long prompt, by compute and by the whole"
                " model."
            ),
        ),
    },
    "Look up": {
        "schema": (
            "catalog:schema",
            (
                "Print every scenario key with type, unit, default and limits; or plan.json's"
                " JSON Schema."
            ),
        ),
        "models": ("catalog:models", "Print the model catalog."),
        "gpus": ("catalog:gpus", "Print the GPU catalog."),
        "presets": (
            "catalog:presets",
            "Print the cluster presets: what cluster.preset may name.",
        ),
        "engines": (
            "catalog:engines",
            "Print the engine profiles: what engine.name and engine.version may name.",
        ),
        "prices": (
            "catalog:prices",
            'Print the list prices of GPUs, which cost.prices = "catalog" takes.',
        ),
    },
    "Measure": {
        "calibrate": (
            "measured:calibrate",
            "Fit step times, path and interference to timed steps, or to load tests with --from.",
        ),
        "validate": (
            "measured:validate",
            "Predict every row; print errors by source, engine, model, GPU and load.",
        ),
    },
    "Network and training": {
        "fabric": (
            "network:app",
            "Topologies, collectives on them, bills of materials, the rail-only study.",
        ),
        "place": (
            "place:place",
            (
                "Place a plan's replicas or a job's ranks; print cost, what crosses each tier, the"
                " bound."
            ),
        ),
        "spares": (
            "network:spares",
            "Count the spare GPUs, nodes, replicas or switches that keep NEEDED of them working.",
        ),
        "train": (
            "train:train",
            "Estimate a training run: step, FLOP/s, memory, days, energy, failures.",
        ),
    },
    "Other stacks": {
        "export": (
            "stacks:export",
            "Write a plan for another serving stack: commands of its engines, or its files.",
        ),
        "accept": (
            "stacks:accept",
            "Write a plan as a test that a buyer holds a vendor to: load, limits, alerts, page.",
        ),
        "read": (
            "stacks:read",
            "Read what runs in another stack as a scenario and pools, to predict and to better it.",
        ),
        "traffic": (
            "stacks:traffic",
            "Describe the traffic of a log as the load of a scenario.",
        ),
    },
}

app = lazy_app("sizing.cli", "Size an LLM inference cluster for its latency SLO.", COMMANDS)
