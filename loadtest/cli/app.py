"""The commands of `loadtest`, in the order of the help."""

from __future__ import annotations

from minicluster.lazy_commands import lazy_app

COMMANDS = {
    "Commands": {
        "run": (
            "run:run",
            "Load an endpoint as its plan or the options say, and judge the latencies.",
        ),
        "report": ("run:report", "Judge a run again from its samples, and write its report."),
        "import": (
            "run:import_results",
            (
                "Judge what another load generator measured, as a run for compare and `sizing"
                " calibrate`."
            ),
        ),
        "selftest": (
            "run:selftest",
            "Measure the client's own error and capacity against a mock server with known timings.",
        ),
        "search": (
            "studies:search",
            "Find the highest request rate that meets the SLO, and compare it with the plan's.",
        ),
        "compare": (
            "studies:compare",
            "Compare two runs, and mark the differences that are statistically significant.",
        ),
    }
}

app = lazy_app(
    "loadtest.cli",
    "Load tests of LLM endpoints, judged by their SLO and by the predicted latencies.",
    COMMANDS,
)
