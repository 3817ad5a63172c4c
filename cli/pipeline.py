"""`brokerless pipeline …`: a whole pipeline from one TOML file."""

import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import cyclopts

from brokerless.cli.options import Json
from brokerless.cli.output import result
from brokerless.core import load_toml
from brokerless.core.errors import MissingDependency
from brokerless.spark_collector.collector.inputs.factory import all_inputs
from brokerless.spark_collector.pipeline.commands import (
    collector_commands,
    compact_commands,
    job_commands,
    submit_lines,
)
from brokerless.spark_collector.pipeline.config import PipelineConfig
from brokerless.spark_collector.pipeline.manifests import manifests
from brokerless.spark_collector.pipeline.supervisor import Supervisor
from brokerless.spark_collector.session.jar import shipped_jar

app = cyclopts.App(
    name="pipeline",
    help="Collectors, tables and jobs from one TOML file.",
    help_epilogue="Example: brokerless pipeline run shop.toml",
)
File = Annotated[Path, cyclopts.Parameter(help="the pipeline's TOML file")]


@app.command(help_epilogue="Example: brokerless pipeline run shop.toml")
def run(
    file: File,
    /,
    *,
    check: Annotated[
        bool, cyclopts.Parameter(help="read the file, print the commands, and end", negative="")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run the collectors and jobs of a file on this machine; what ends is started again, until Ctrl-C or SIGTERM."""
    config = load_toml(file, PipelineConfig)
    for collector in config.collector:
        all_inputs(collector)
    commands = [
        *collector_commands(config, str(file.absolute())),
        *job_commands(config),
        *compact_commands(config),
    ]
    if check:
        for each in commands:
            fields: dict[str, object] = {"name": each.name, "arguments": each.arguments}
            result(fields, f"{each.name}: brokerless {' '.join(each.arguments)}", as_json=as_json)
        return
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def say(name: str, text: str) -> None:
        result({"name": name, "what": text}, f"{name}: {text}", as_json=as_json)
        sys.stdout.flush()

    Supervisor([sys.executable, "-m", "brokerless.cli"], commands, on_change=say).run(stop)
    say(config.name, "stopped")


@app.command(help_epilogue="Example: brokerless pipeline commands shop.toml")
def commands(file: File, /, *, as_json: Json = False) -> None:
    """Print a spark-submit line for each job of a file, for a cluster of many machines."""
    jar = shipped_jar()
    for line in submit_lines(
        load_toml(file, PipelineConfig),
        script=str(Path(__file__).with_name("__main__.py")),
        jar=str(jar) if jar else "",
    ):
        result({"command": line}, line, as_json=as_json)


@app.command(name="manifests", help_epilogue="Example: brokerless pipeline manifests shop.toml")
def manifests_(file: File, /, *, as_json: Json = False) -> None:
    """Print Kubernetes manifests for the collectors and jobs of a file."""
    try:
        import yaml
    except ImportError:
        raise MissingDependency("pyyaml", "metrics", "printing manifests") from None
    for made in manifests(load_toml(file, PipelineConfig), file.read_text("utf-8")):
        result(made, "---\n" + yaml.safe_dump(made, sort_keys=False).rstrip(), as_json=as_json)
