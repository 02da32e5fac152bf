"""The commands of `serving`, in the order of the help."""

from __future__ import annotations

from minicluster.lazy_commands import lazy_app

COMMANDS = {
    "Commands": {
        "demo-model": (
            "deploy:demo_model",
            "Make the demo model: random weights with their own tokenizer, without downloads.",
        ),
        "up": ("deploy:up", "Deploy a plan; returns when a request has succeeded on every path."),
        "status": ("inspect:status", "Show planned, deployed and healthy replicas."),
        "verify": (
            "inspect:verify",
            "Compare what runs with the plan: replicas, TP, nodes, cores, limits, engine settings.",
        ),
        "logs": (
            "inspect:logs",
            "Print the end of each replica's log, of the running or else the last deployment.",
        ),
        "scale": (
            "scale:scale",
            (
                "Move replicas between prefill and decode, or with --auto follow the rate, no"
                " downtime."
            ),
        ),
        "down": (
            "deploy:down",
            "Stop what `serving up` started once its answers have ended, and remove its state.",
        ),
        "manifest": ("deploy:manifest", "Print the deployment as a file for other tools."),
        "cluster": ("cluster:app", "Labelled Ray cluster to deploy on."),
        "measure": (
            "measure:measure",
            "Time a grid of steps of the deployed pools, each alone and beside the other one busy.",
        ),
    }
}

app = lazy_app(
    "serving.cli",
    "Deployment of a plan on Ray Serve and vLLM: split prefill and decode, or mixed pools.",
    COMMANDS,
)
