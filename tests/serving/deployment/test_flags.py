"""Our reading of `vllm serve`'s command line is that of vLLM's own parser."""

# ruff: noqa: E501  (a list of command lines)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minicluster.errors import InputError
from sizing.stacks.flags import arguments, table
from tests.serving.forks import Forks

VLLM = """
import argparse, dataclasses, io, json, sys
from contextlib import redirect_stderr
from pathlib import Path
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for action in parser._actions:
    action.default = argparse.SUPPRESS
def plain(value):
    return {"config": True} if dataclasses.is_dataclass(value) else value
for line in json.loads(Path(sys.argv[1]).read_text()):
    try:
        with redirect_stderr(io.StringIO()):
            found = vars(parser.parse_args(line))
    except (SystemExit, Exception):
        print("= null")
        continue
    print("=", json.dumps({name: plain(value) for name, value in found.items()}, default=str))
"""

SAMPLES = {
    "int": ["7", "x", "1k"], "float": ["0.5", "x"], "tokens": ["8k", "1K", "2.5k", "1.5K", "7", "x", "auto"],
    "tokens_or_auto": ["auto", "-1", "8M"], "text": ["x"], "config": ["{}", "x"], "text_or_config": ["{}"],
}  # fmt: skip

LISTS = {"lora_modules", "middleware", "device_ids"}
"""Arguments that vLLM makes lists of by rules of their own; none but the number of the first is read."""

OWN = [
    "m --tensor-parallel-size=2 -tp=4", "-tp 2 m", "m -tp2", "m --tensor_parallel_size 2", "m --tensor 2",
    "m --max-num-s 2", "m --max-num-seqs 2 n", "m --no-enable-expert-parallel -ep", "m --no-port 2", "m --port",
    "m -asc 2 -q fp8 -dcp 2 -pcp 2 -dpn 0 -dpl 1 -n 2 -r 1", "m --nothing 1", "m -O3", "m -O 2", "m -O=1",
    "m --hf-overrides.a.b 8k --hf-overrides.c+ x,y --hf-overrides.c+=z", "m --hf-overrides.a=true",
    "m -sc.method mtp -sc.num_speculative_tokens 2", "m --served-model-name a b --port 9", "m --kv-cache-dtype fp9",
    "m --lora-modules a=/x b=/y", "m --headless --enable-lora", "m --middleware a --middleware b",
]  # fmt: skip


def lines() -> list[list[str]]:
    """Return command lines with every name of every flag, and with the forms that parsers take."""
    found = [line.split() for line in OWN]
    for row in table().values():
        if row["names"][0] in {"--lora-modules", "--config"}:
            continue
        samples = row.get("choices", SAMPLES.get(row["kind"], []))
        values = [[str(each)] for each in [*samples, "no choice"]] if "choices" in row else [
            [each] for each in samples
        ]  # fmt: skip
        for name in row["names"]:
            long = name.startswith("--")
            if row["kind"] in {"switch", "boolean"}:
                found.append(["m", name])
                found += [["m", f"--no-{name[2:]}"]] if long else []
            found += [["m", name, *each] for each in values]
            found += [
                ["m", f"{name.replace('-', '_').replace('__', '--')}={each[0]}"]
                for each in values
                if long
            ]
            found += [["m", name[:-1], *each] for each in values[:1] if long]
    return found


def ours(line: list[str]) -> dict[str, Any] | None:
    """Return what we read; `None`: refused."""
    try:
        return arguments(line, "line")
    except InputError:
        return None


def test_every_flag_is_read_as_vllm_reads_it(forks: Forks, tmp_path: Path) -> None:
    """The same lines are refused, and those that are taken have the same arguments and values."""
    file = tmp_path / "lines.json"
    file.write_text(json.dumps(lines()))
    apart = []
    printed = [each[1:] for each in forks.run(VLLM, str(file)) if each.startswith("=")]
    for line, text in zip(lines(), printed, strict=True):
        theirs, mine = json.loads(text), ours(line)
        if theirs is not None:
            theirs["model"] = theirs.pop("model_tag", None) or theirs.get("model")
        for name, value in (theirs or {}).items():
            if mine and (name in LISTS or (value == {"config": True} and mine[name] == {})):
                mine[name] = value
        if json.loads(json.dumps(mine)) != theirs:
            apart.append((line, mine, theirs))
    assert not apart, "\n".join(map(str, apart))


def test_the_table_is_that_of_the_installed_vllm(forks: Forks) -> None:
    """`scripts/vllm_flags.py` writes what is committed."""
    root = Path(__file__).parents[3]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import vllm_flags; print(vllm_flags.table())"
    )
    printed = "\n".join(forks.run(code, str(root / "scripts"))).rstrip("\n")
    assert printed == (root / "configs" / "flags" / "vllm-0.29.0.toml").read_text().rstrip("\n")
