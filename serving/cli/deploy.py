"""`serving demo-model`, `up`, `down` and `manifest`."""

from __future__ import annotations

import json
import os
from dataclasses import replace as with_options
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minicluster.command import terminable
from minicluster.errors import Fault, InputError
from minicluster.shell import talk
from serving.cli.progress import progress

if TYPE_CHECKING:
    from minicluster.plan import Deployment, Plan
    from serving.deployment.engine_args import DeployTarget
    from serving.operations.probe import Readiness


REPLACEABLE = {"plan", "model", "prefill_deadline_s", "kv_deadline_s", "lora_modules", "replace"}
"""Parameters of `up` that another plan may bring; the others stay as they run."""


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Directory to write the model to.")] = Path(
        ".minicluster/models/demo"
    ),
    dtype: Annotated[
        str, typer.Option(help="Weight type: bf16, fp32, or auto (the native one of this CPU).")
    ] = "auto",
    experts: Annotated[
        int, typer.Option(min=0, help="Experts of each layer, two for a token (Mixtral); 0: dense.")
    ] = 0,
) -> None:
    """Make the demo model: random weights with their own tokenizer, without downloads."""
    from serving.measurement import cpu_dtype
    from serving.measurement.demo_model import (
        FP32_SHAPE,
        MOE_SHAPE,
        DemoShape,
        make_demo_model,
    )

    if dtype == "auto":
        pace = cpu_dtype.measure()
        dtype = cpu_dtype.native_dtype(pace)
        talk.print(cpu_dtype.choice_text(pace), highlight=False, soft_wrap=True)
    dense = FP32_SHAPE if dtype == "fp32" else DemoShape()
    shape = with_options(MOE_SHAPE, num_experts=experts) if experts else dense
    typer.echo(make_demo_model(directory, shape, dtype))


def up(  # noqa: PLR0913, PLR0917  (a command's options)
    context: typer.Context,
    plan: Annotated[
        Path, typer.Argument(help="Plan (from `sizing plan -o`), or a deployment to measure.")
    ],
    host: Annotated[str, typer.Option(help="Address of the endpoint.")] = "127.0.0.1",
    open_access: Annotated[
        bool,
        typer.Option(
            "--open", help="Endpoint without API keys, for every client that reaches --host."
        ),
    ] = False,
    port: Annotated[
        int, typer.Option(help="Port of the endpoint; 0: any free port.", min=0, max=65535)
    ] = 8000,
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of an existing Ray cluster (default: a new one on this machine)."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Directory of the model on this machine (default: the plan's)."),
    ] = None,
    wait_s: Annotated[
        float,
        typer.Option("--wait", help="Longest wait for the nodes of --address, seconds.", min=0),
    ] = 0,
    prefill_deadline_s: Annotated[
        float | None,
        typer.Option(
            "--prefill-deadline",
            help="Deadline of prefill, seconds (default: twice the SLO's TTFT).",
            min=0.1,
        ),
    ] = None,
    kv_deadline_s: Annotated[
        float | None,
        typer.Option(
            "--kv-deadline",
            help="Deadline from prefill to the first token, seconds (default: as for prefill).",
            min=0.1,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(help="vllm, or simulated: the plan's engines by the clock, on any machine."),
    ] = "vllm",
    lora_modules: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="LoRA adapter, a folder as PEFT writes it, that requests name as their model; once"
            " for each adapter. Simulated engines need no folder: NAME.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            help="Certificate chain (PEM): the endpoint speaks HTTPS; read again when it changes.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", help="Its private key (PEM), without a password.")
    ] = None,
    slowdown: Annotated[
        float | None,
        typer.Option(help="Seconds that each second of a simulated engine takes (default: 1)."),
    ] = None,
    step_times: Annotated[
        Path | None,
        typer.Option(
            help="File with step times of simulated engines in place of the plan's: engines as a"
            " calibration meets them."
        ),
    ] = None,
    endpoints: Annotated[
        int | None,
        typer.Option(
            help="Endpoint processes, which listen at one port (default: the plan's).", min=1
        ),
    ] = None,
    endpoint_hosts: Annotated[
        int,
        typer.Option(
            help="Number of Ray nodes of --address, to have endpoint processes on each of them, for"
            " a load balancer in front; needs --host 0.0.0.0 (or ::).",
            min=1,
        ),
    ] = 1,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Put the plan in the place of the running one, without a failed request.",
        ),
    ] = False,
) -> None:
    """Deploy a plan; returns when a request has succeeded on every path."""
    from minicluster.plan import Plan, read_plan_or_deployment
    from serving.api.access import KEYS_FILE, refuse_open
    from serving.api.tls import tls_files
    from serving.cluster.state import changing
    from serving.deployment.engine_args import SIMULATED, read_media_domains
    from serving.deployment.feasibility import lora_findings, plan_findings, refuse
    from serving.deployment.mapped_gpus import read_gpus
    from serving.deployment.target import located
    from serving.operations.deploy import Site, bring_up
    from serving.request.cost import read_token_limit

    read = read_plan_or_deployment(plan)
    planned = read if isinstance(read, Plan) else None
    deployment = located(read.deployment if isinstance(read, Plan) else read, model)
    if replace:
        _replace(context, deployment, planned, lora_modules or [])
        return
    engines = _engines(engine, deployment, planned, slowdown, step_times)
    kind = engines.kind
    if kind != SIMULATED and planned is not None:
        refuse(plan_findings(planned))
    adapters = _adapters(lora_modules or [], kind)
    refuse(lora_findings(deployment, adapters, kind))
    if not open_access:
        refuse_open(host, os.environ)
    tls = tls_files(tls_cert, tls_key)
    site = Site(
        target=with_options(
            engines,
            deadlines_s=(prefill_deadline_s, kv_deadline_s),
            token_limit=read_token_limit(os.environ),
            media_domains=read_media_domains(os.environ),
            gpus=read_gpus(os.environ) if kind == "gpu" else (),
            lora_modules=adapters,
            endpoints=endpoints,
            endpoint_hosts=_endpoint_hosts(endpoint_hosts, host, address),
        ),
        host=host,
        port=port or _free_port(host),
        address=address,
        wait_s=wait_s,
        tls=tls,
    )
    with progress() as report, terminable(), changing():
        state, ready = bring_up(
            deployment,
            site,
            report=report,
            plan=planned,
            before_start=_warn_of_dtype if kind == "cpu" else None,
        )
    typer.echo(f"ready: {state.base_url}/v1 serves {deployment.model.id}")
    if kind == SIMULATED:
        typer.echo(_simulated_text(state.slowdown, step_times))
    typer.echo(f"checked: {_checked(ready)}")
    _warn_of_cores(planned, state.slowdown, address)
    body = {"model": deployment.model.id, "prompt": "Hello", "max_tokens": 16, "stream": True}
    trust = "" if tls is None else f"--cacert {tls.cert} "
    key = '-H "Authorization: Bearer $KEY" ' if KEYS_FILE in os.environ else ""
    url = f"{state.base_url}/v1/completions"
    typer.echo(f"try:   curl -N {trust}{key}{url} -d '{json.dumps(body)}'")
    typer.echo(f"logs:  serving logs   (all of them: {state.logs})")
    typer.echo("stop:  serving down")


def _engines(
    engine: str,
    deployment: Deployment,
    plan: Plan | None,
    slowdown: float | None,
    step_times: Path | None,
) -> DeployTarget:
    """Return what kind of engines is asked for, and how fast simulated ones are."""
    from minicluster.engine_model.true_steps import read_true_steps
    from serving.deployment.compile import kind_of
    from serving.deployment.engine_args import SIMULATED, DeployTarget
    from serving.simulated.engine import check_slowdown

    if engine not in {"vllm", SIMULATED}:
        raise InputError("--engine", engine, f"vllm or {SIMULATED}")
    if engine == "vllm":
        for name, value in (("--slowdown", slowdown), ("--step-times", step_times)):
            if value is not None:
                raise InputError(
                    name, str(value), f"--engine {SIMULATED}: real engines take theirs"
                )
        return DeployTarget(kind=kind_of(deployment))
    if step_times is None and plan is None:
        expected = "a plan with step times, or --step-times"
        raise InputError("--engine", engine, expected, "`sizing plan -o` it")
    if step_times is not None and slowdown is not None:
        expected = "no --slowdown besides: its seconds are the clock's"
        raise InputError("--step-times", str(step_times), expected)
    return DeployTarget(
        kind=SIMULATED,
        slowdown=check_slowdown(1.0 if slowdown is None else slowdown),
        truth=None if step_times is None else read_true_steps(step_times),
    )


def _simulated_text(slowdown: float, step_times: Path | None) -> str:
    if step_times is not None:
        return f"simulated engines with the step times of {step_times}; devices were not checked"
    return (
        f"simulated engines, {slowdown:g} times slower than the plan: latencies are those of the"
        " plan's model, not measurements; devices were not checked"
    )


def _endpoint_hosts(hosts: int, host: str, address: str | None) -> int:
    if hosts > 1 and address is None:
        raise InputError(
            "--endpoint-hosts", hosts, "1 without --address: a new cluster has one host"
        )
    if hosts > 1 and host not in {"0.0.0.0", "::"}:  # noqa: S104  (compared, not listened at)
        raise InputError("--host", host, "0.0.0.0 or :: with --endpoint-hosts: each has its own")
    return hosts


def _warn_of_cores(plan: Plan | None, slowdown: float, address: str | None) -> None:
    """Say so if this machine has fewer cores than the plan's load takes in front of the engines."""
    if plan is None or plan.endpoint is None or address is not None:  # the head may be elsewhere
        return
    needed, there = (plan.endpoint.cores + plan.endpoint.gate_cores) / slowdown, os.cpu_count()
    if there is not None and needed > there:
        typer.echo(
            f"warning: the plan's load keeps {needed:.1f} cores of endpoint processes and their"
            f" gate busy; this machine has {there}: it will not carry that load"
        )


def _adapters(named: list[str], kind: str) -> dict[str, str]:
    from serving.deployment.engine_args import SIMULATED

    folders: dict[str, str] = {}
    for module in named:
        name, equals, path = module.partition("=")
        bare = kind == SIMULATED and not equals
        if not (name and (path or bare)) or name in folders:
            form = "NAME or NAME=PATH" if kind == SIMULATED else "NAME=PATH"
            raise InputError("--lora-modules", module, f"{form}, no name twice")
        folders[name] = str(Path(path).absolute()) if path else ""
    return folders


def _replace(
    context: typer.Context, deployment: Deployment, plan: Plan | None, lora_modules: list[str]
) -> None:
    """Put a plan in the place of the one that runs; deadlines and adapters not given stay."""
    from serving.api.access import KEYS
    from serving.cluster.state import changing
    from serving.deployment.compile import hash_of
    from serving.deployment.engine_args import SIMULATED, DeployTarget, read_media_domains
    from serving.deployment.feasibility import lora_findings, plan_findings, refuse
    from serving.deployment.mapped_gpus import refuse_mapped
    from serving.operations.replace import refuse_changes, refuse_replacement, replace_plan
    from serving.operations.status import current
    from serving.request.cost import MAX_OUTPUT_TOKENS, read_token_limit

    running, options = current(), context.params
    changed = {
        option.opts[0]: options[name]
        for option in context.command.params
        if (name := str(option.name)) not in REPLACEABLE
        and (source := context.get_parameter_source(name)) is not None
        and source.name == "COMMANDLINE"
    }
    longest = read_token_limit(os.environ)
    refuse_changes(running, changed | ({} if longest is None else {MAX_OUTPUT_TOKENS: longest}))
    refuse_mapped(running, os.environ, "--replace")
    refuse_replacement(running, deployment)
    deadlines_s = (
        options["prefill_deadline_s"] or running.deadlines_s[0],
        options["kv_deadline_s"] or running.deadlines_s[1],
    )
    adapters = _adapters(lora_modules, running.target)
    adapters = adapters or (running.lora_modules if deployment.engine.lora else {})
    same = hash_of(plan or deployment) == running.plan_hash and not running.changes
    same = same and adapters == running.lora_modules
    if same and deadlines_s == running.deadlines_s:
        typer.echo(f"nothing to do: {running.base_url} runs this plan")
        return
    if running.target == SIMULATED and plan is None:
        fault = Fault("was given a deployment to measure")
        raise InputError("--replace", fault, "given a plan, which has step times")
    if running.target != SIMULATED and plan is not None:
        refuse(plan_findings(plan))
    refuse(lora_findings(deployment, adapters, running.target))
    target = DeployTarget(
        kind=running.target,
        slowdown=running.slowdown,
        deadlines_s=deadlines_s,
        token_limit=running.token_limit,
        media_domains=read_media_domains(os.environ),
        lora_modules=adapters,
    )
    os.environ.pop(KEYS, None)  # new raylets would inherit it; the endpoint has its keys
    with progress() as report, terminable(), changing():
        state, ready = replace_plan(deployment, running, target, plan=plan, report=report)
    typer.echo(f"replaced: {state.base_url}/v1 serves by plan {state.plan_hash}")
    typer.echo(f"checked: {_checked(ready)}")


def _checked(ready: Readiness) -> str:
    first = "" if ready.ttft_s is None else f"first token {ready.ttft_s * 1e3:.0f} ms; "
    handoff = f"KV hand-off {ready.handoff_s * 1e3:.0f} ms"
    return f"{first}{handoff}; earlier stalled transfers: {ready.stalls}"


def down(
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster: remove what any directory has deployed on it "
            "(default: stop what this directory has)."
        ),
    ] = None,
) -> None:
    """Stop what `serving up` started once its answers have ended, and remove its state."""
    from serving.cluster.state import read_state
    from serving.operations.deploy import drain, remove_application, take_down

    state = read_state()
    ours = state is not None and address in {None, state.address}
    if not ours and address is None:
        typer.echo("nothing is deployed from this directory")
        return
    with progress() as report:
        report("stopping")
        if state is not None and ours:
            running = take_down(state)
            message = "nothing of it runs any more; its record is removed"
        else:
            drain(str(address))
            running = remove_application(str(address))
            message = f"nothing is deployed at {address}"
    typer.echo("stopped" if running else message)


def _free_port(host: str) -> int:
    from serving.cluster.ports import free_ports

    try:
        return free_ports(1, host)[0]
    except OSError:
        raise InputError("--host", host, "an address of this machine") from None


def _warn_of_dtype(deployment: Deployment) -> None:
    """Warn on stderr if this CPU is slow in a dtype of *deployment*."""
    from serving.measurement import cpu_dtype

    pace = cpu_dtype.measure()
    for dtype in sorted({pool.dtype for pool in deployment.pools}):
        warning = cpu_dtype.dtype_warning(dtype, pace)
        if warning is not None:
            talk.print(warning, style="yellow", highlight=False, soft_wrap=True)


def manifest(
    plan: Annotated[Path, typer.Argument(help="Plan (from `sizing plan -o`).")],
    kind: Annotated[str, typer.Option("--format", help="Format: ray-serve, kuberay or compose.")],
    image: Annotated[
        str, typer.Option(help="Container image that holds minicluster (Dockerfile).")
    ] = "minicluster:latest",
    model: Annotated[
        str | None, typer.Option(help="Directory of the model on the hosts (default: the plan's).")
    ] = None,
    open_access: Annotated[
        bool,
        typer.Option("--open", help="Endpoint without API keys, for every client that reaches it."),
    ] = False,
) -> None:
    """Print the deployment as a file for other tools."""
    from minicluster.plan import read_plan
    from serving.deployment.feasibility import plan_findings, refuse
    from serving.deployment.manifest import FORMATS, manifest_findings, manifest_text

    if kind not in FORMATS:
        raise InputError("--format", kind, "one of " + ", ".join(FORMATS))
    planned = read_plan(plan)
    refuse([*plan_findings(planned), *manifest_findings(planned.deployment)])
    text = manifest_text(planned, plan, kind, image=image, model=model, open_access=open_access)
    typer.echo(text, nl=False)
